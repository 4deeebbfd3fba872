package main

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const (
	readChunk = 32 << 10
	// discardPause after each full chunk bounds what a background writer can make the agent spend on it.
	discardPause = time.Millisecond
)

var chunks = sync.Pool{New: func() any { return new([readChunk]byte) }}

// sink takes what a command writes; while it takes, the command is held up once its pipe is full.
type sink interface{ write(data []byte) }

// output collects what a command writes to one of its streams.
type output struct {
	pipe  *os.File
	sink  sink
	ended chan struct{}
	// eof is read after ended: nobody holds the writing end any more.
	eof bool
}

// openOutput makes a pipe; the returned descriptor is the command's end, which blocks as commands expect.
func openOutput(to sink) (*output, int, error) {
	var ends [2]int
	if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	if err := syscall.SetNonblock(ends[0], true); err != nil {
		return nil, -1, err
	}
	reader := os.NewFile(uintptr(ends[0]), "output")
	return &output{pipe: reader, sink: to, ended: make(chan struct{})}, ends[1], nil
}

func (o *output) collect() {
	defer close(o.ended)
	chunk := chunks.Get().(*[readChunk]byte)
	defer chunks.Put(chunk)
	for {
		n, err := o.pipe.Read(chunk[:])
		o.sink.write(chunk[:n])
		if err != nil {
			o.eof = !errors.Is(err, os.ErrDeadlineExceeded)
			return
		}
	}
}

// finish is called after the command's exit: it takes what the pipe holds at this moment, all of what the command
// itself wrote among it, and leaves the pipe to discard when a background child still holds it.
func (o *output) finish() {
	select {
	case <-o.ended:
	default:
		o.pipe.SetReadDeadline(time.Unix(1, 0))
		<-o.ended
	}
	if o.eof {
		o.pipe.Close()
		return
	}
	o.takePending()
	o.pipe.SetReadDeadline(time.Time{})
	go discard(o.pipe)
}

func (o *output) takePending() {
	connection, err := o.pipe.SyscallConn()
	if err != nil {
		return
	}
	connection.Control(func(fd uintptr) {
		var pending int32
		if _, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, fd, syscall.TIOCINQ, uintptr(unsafe.Pointer(&pending))); errno != 0 {
			return
		}
		chunk := chunks.Get().(*[readChunk]byte)
		defer chunks.Put(chunk)
		for left := int(pending); left > 0; {
			n, err := syscall.Read(int(fd), chunk[:min(left, readChunk)])
			if err == syscall.EINTR {
				continue
			}
			if err != nil || n <= 0 {
				return
			}
			o.sink.write(chunk[:n])
			left -= n
		}
	})
}

// discard reads a pipe to its end, so that a daemon that writes to it neither blocks nor dies of SIGPIPE.
func discard(pipe *os.File) {
	defer pipe.Close()
	connection, err := pipe.SyscallConn()
	if err != nil {
		return
	}
	for {
		count := 0
		// The chunk is taken only once there is something to read: a silent daemon costs no buffer.
		err := connection.Read(func(fd uintptr) bool {
			chunk := chunks.Get().(*[readChunk]byte)
			defer chunks.Put(chunk)
			var err error
			for err = syscall.EINTR; err == syscall.EINTR; {
				count, err = syscall.Read(int(fd), chunk[:])
			}
			return err != syscall.EAGAIN
		})
		if err != nil || count <= 0 {
			return
		}
		if count == readChunk {
			time.Sleep(discardPause)
		}
	}
}
