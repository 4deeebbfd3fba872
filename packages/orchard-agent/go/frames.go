package main

import (
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"sync"
)

// Frames are [type, 1 byte][length, 4 bytes big-endian][data].
const (
	frameHead = 5
	maxFrame  = 64 << 10
)

// frameWriter writes whole frames from several goroutines; a slow client holds all of them up.
type frameWriter struct {
	mu sync.Mutex
	to io.Writer
}

func (f *frameWriter) write(kind byte, data []byte) error {
	var head [frameHead]byte
	head[0] = kind
	binary.BigEndian.PutUint32(head[1:], uint32(len(data)))
	parts := net.Buffers{head[:], data}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := parts.WriteTo(f.to)
	return err
}

func (f *frameWriter) writeJSON(kind byte, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return f.write(kind, text)
}

// readFrame reads into the buffer; a longer frame is refused.
func readFrame(from io.Reader, buffer []byte) (kind byte, data []byte, err error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(from, head[:]); err != nil {
		return 0, nil, err
	}
	length := binary.BigEndian.Uint32(head[1:])
	if int64(length) > int64(len(buffer)) {
		return 0, nil, io.ErrShortBuffer
	}
	data = buffer[:length]
	_, err = io.ReadFull(from, data)
	return head[0], data, err
}

// frameSink sends what a command writes as frames of one type.
type frameSink struct {
	frames *frameWriter
	kind   byte
}

func (s *frameSink) write(data []byte) {
	if len(data) > 0 {
		// A broken connection is noticed by its reader.
		_ = s.frames.write(s.kind, data)
	}
}

// failure is how a stream tells what a plain answer would have told with its status.
type failure struct {
	Status  int    `json:"status"`
	Code    string `json:"error"`
	Message string `json:"message"`
}

func asFailure(err error) failure {
	refused := asRefusal(err)
	return failure{refused.status, refused.code, refused.message}
}
