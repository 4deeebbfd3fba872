package main

import (
	"encoding/binary"
	"errors"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// The client's frames of a terminal; its data frames are typed.
const (
	frameResize = 1
	frameSignal = 2
)

const (
	// typedFrames is how many frames may wait for a program that does not read; a client waits for their
	// acknowledgement before it sends more.
	typedFrames = 32
	// drainQuiet is how long the terminal may be silent after its programs' end before it counts as read.
	drainQuiet = 200 * time.Millisecond
	// openPeer opens a terminal's other side without its name.
	openPeer = 0x5441
)

// console is the agent's side of a terminal.
type console struct{ *os.File }

func control(fd uintptr, request uintptr, argument unsafe.Pointer) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, request, uintptr(argument)); errno != 0 {
		return errno
	}
	return nil
}

// openConsole makes a terminal; the returned descriptor is the command's side.
func openConsole(rows, cols uint16, owner *account) (*console, int, error) {
	fd, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, refuse(503, "no_terminal", "the sandbox can't make a terminal: "+err.Error())
	}
	c := &console{os.NewFile(uintptr(fd), "terminal")}
	var locked int32
	err = control(uintptr(fd), syscall.TIOCSPTLCK, unsafe.Pointer(&locked))
	var peer uintptr
	if err == nil {
		var errno syscall.Errno
		peer, _, errno = syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), openPeer,
			syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC)
		if errno != 0 {
			err = errno
		}
	}
	if err != nil {
		c.Close()
		return nil, -1, refuse(503, "no_terminal", "the sandbox can't make a terminal: "+err.Error())
	}
	if owner.credential != nil {
		// Where it can't, programs that open /dev/tty by its name are refused; nothing else is.
		syscall.Fchown(int(peer), int(owner.credential.Uid), -1)
	}
	c.resize(rows, cols)
	return c, int(peer), nil
}

func (c *console) with(do func(fd uintptr)) {
	if connection, err := c.SyscallConn(); err == nil {
		connection.Control(do)
	}
}

func (c *console) resize(rows, cols uint16) {
	size := [4]uint16{rows, cols}
	c.with(func(fd uintptr) { control(fd, syscall.TIOCSWINSZ, unsafe.Pointer(&size)) })
}

// signal goes to the foreground process group.
func (c *console) signal(number syscall.Signal) {
	c.with(func(fd uintptr) {
		var group int32
		if control(fd, syscall.TIOCGPGRP, unsafe.Pointer(&group)) == nil && group > 1 {
			syscall.Kill(-int(group), number)
		}
	})
}

func sizeOf(r *http.Request, name string) (uint16, error) {
	value, err := strconv.ParseUint(r.URL.Query().Get(name), 10, 16)
	if err != nil || value == 0 {
		return 0, refuse(400, "bad_request", name+" must be 1 to 65535")
	}
	return uint16(value), nil
}

// terminal runs a command on a terminal of its own until it exits or the client goes away; either way all that it
// started is killed.
func (s *server) terminal(w http.ResponseWriter, r *http.Request) error {
	rows, err := sizeOf(r, "rows")
	if err != nil {
		return err
	}
	cols, err := sizeOf(r, "cols")
	if err != nil {
		return err
	}
	request, err := readExecRequest(r.Body)
	if err != nil {
		return err
	}
	defer request.close()
	free, err := s.slot()
	if err != nil {
		return err
	}
	defer free()
	p, err := s.executor.plan(request, "TERM=xterm-256color")
	if err != nil {
		return err
	}
	defer p.leaf.release()
	master, peer, err := openConsole(rows, cols, p.account)
	if err != nil {
		return err
	}
	defer master.Close()
	connection, err := upgrade(w, r)
	if err != nil {
		syscall.Close(peer)
		return err
	}
	defer connection.Close()
	frames := &frameWriter{to: connection}
	started := time.Now()
	side := uintptr(peer)
	pid, err := s.executor.startOn(p, []uintptr{side, side, side}, &syscall.SysProcAttr{Setsid: true, Setctty: true})
	syscall.Close(peer)
	if err != nil {
		sendResult(frames, p, nil, 0, err)
		return nil
	}
	exited := s.executor.reaper.exit(pid, started)
	gone := make(chan struct{})
	go func() {
		master.serve(connection, frames)
		close(gone)
		// Output that nobody reads must not hold the end up.
		connection.Close()
	}()
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		master.show(frames)
	}()
	result, status := s.executor.await(p, pid, started, exited, gone)
	s.executor.kill(pid, p)
	master.SetReadDeadline(time.Now().Add(drainQuiet))
	<-shown
	sendResult(frames, p, result, status, nil)
	return nil
}

// show sends what is written to the terminal, until its other side is closed. After a deadline was set it goes on for
// as long as something comes.
func (c *console) show(frames *frameWriter) {
	chunk := chunks.Get().(*[readChunk]byte)
	defer chunks.Put(chunk)
	draining := false
	for {
		n, err := c.Read(chunk[:])
		if n > 0 && frames.write(frameData, chunk[:n]) != nil {
			return
		}
		switch {
		case err == nil && draining:
			c.SetReadDeadline(time.Now().Add(drainQuiet))
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && !draining:
			// The time may have gone by in a write: what is there now is still to be read.
			draining = true
			c.SetReadDeadline(time.Now().Add(drainQuiet))
		default:
			return
		}
	}
}

// serve does what the client's frames say until it goes away or breaks the rules.
func (c *console) serve(connection *stream, frames *frameWriter) {
	typed := make(chan []byte, typedFrames)
	defer close(typed)
	go func() {
		for data := range typed {
			if _, err := c.Write(data); err != nil {
				continue
			}
			if frames.write(frameTyped, binary.BigEndian.AppendUint32(nil, uint32(len(data)))) != nil {
				continue
			}
		}
	}()
	buffer := make([]byte, maxFrame)
	for {
		kind, data, err := readFrame(connection, buffer)
		switch {
		case err != nil:
			return
		case kind == frameData:
			select {
			case typed <- append([]byte(nil), data...):
			default:
				return
			}
		case kind == frameResize && len(data) == 4:
			c.resize(binary.BigEndian.Uint16(data), binary.BigEndian.Uint16(data[2:]))
		case kind == frameSignal && len(data) == 1 && data[0] >= 1 && data[0] <= 64:
			c.signal(syscall.Signal(data[0]))
		default:
			return
		}
	}
}
