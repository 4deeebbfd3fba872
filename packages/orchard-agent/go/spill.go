package main

import (
	"os"
	"sync"
	"time"
)

// spill keeps the last `limit` bytes of an output in a nameless file, each at its offset modulo the limit.
type spill struct {
	mu    sync.Mutex
	file  *os.File
	limit int64
	// start and end are the offsets of what is kept.
	start, end int64
	closed     bool
	// more is closed at the next change, where somebody waits for one.
	more chan struct{}
}

const (
	maxSpill = 64 << 30
	// memorySpill bounds outputs that are kept in memory, where the temporary folder can't have nameless files.
	memorySpill = 4 << 20
)

func newSpill(limit int64) (*spill, error) {
	file, inMemory, err := anonymousFile("output")
	if err != nil {
		return nil, err
	}
	if inMemory {
		limit = min(limit, memorySpill)
	}
	return &spill{file: file, limit: max(limit, 1)}, nil
}

// write keeps data; where the disk takes no more, what was kept and what could not be is gone, and the next bytes are
// tried again.
func (s *spill) write(data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(data) == 0 {
		return
	}
	end := s.end + int64(len(data))
	if over := int64(len(data)) - s.limit; over > 0 {
		data = data[over:]
	}
	at := end - int64(len(data))
	for len(data) > 0 {
		place := at % s.limit
		part := data[:min(int64(len(data)), s.limit-place)]
		if _, err := s.file.WriteAt(part, place); err != nil {
			s.start = end
			break
		}
		at += int64(len(part))
		data = data[len(part):]
	}
	s.end = end
	s.start = max(s.start, end-s.limit)
	s.changed()
}

// changed wakes those who wait; the caller holds the lock.
func (s *spill) changed() {
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

func (s *spill) wake() {
	s.mu.Lock()
	s.changed()
	s.mu.Unlock()
}

func (s *spill) bounds() (start, end int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.start, s.end
}

// next is closed at the next change.
func (s *spill) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more == nil {
		s.more = make(chan struct{})
	}
	return s.more
}

// read copies bytes from an offset on, or from the first that is kept; it returns where they start.
func (s *spill) read(buffer []byte, offset int64) (start int64, n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return offset, 0, os.ErrClosed
	}
	start = max(offset, s.start)
	buffer = buffer[:min(int64(len(buffer)), max(0, s.end-start))]
	for n < len(buffer) {
		place := (start + int64(n)) % s.limit
		part := buffer[n:min(int64(len(buffer)), int64(n)+s.limit-place)]
		if _, err := s.file.ReadAt(part, place); err != nil {
			return start, n, err
		}
		n += len(part)
	}
	return start, n, nil
}

func (s *spill) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		s.file.Close()
		s.changed()
	}
}

// waitMost bounds how long one request waits, so that a client that stopped is no sign of life for long.
const waitMost = 20 * time.Second
