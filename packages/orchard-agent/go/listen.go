package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// openListener understands tcp:HOST:PORT, unix:PATH, fd:N (a listening socket handed down) and stdio.
func openListener(text string) (net.Listener, error) {
	kind, rest, _ := strings.Cut(text, ":")
	switch kind {
	case "tcp":
		return net.Listen("tcp", rest)
	case "unix":
		os.Remove(rest)
		old := syscall.Umask(0o177)
		defer syscall.Umask(old)
		return net.Listen("unix", rest)
	case "fd":
		number, err := strconv.Atoi(rest)
		if err != nil {
			return nil, fmt.Errorf("bad descriptor in -listen %q", text)
		}
		syscall.CloseOnExec(number)
		file := os.NewFile(uintptr(number), "listener")
		defer file.Close()
		return net.FileListener(file)
	case "stdio":
		return newStdioListener()
	}
	return nil, fmt.Errorf("-listen %q: want tcp:HOST:PORT, unix:PATH, fd:N or stdio", text)
}

// stdioListener yields one connection, on stdin and stdout; its end is the listener's.
type stdioListener struct {
	connection chan net.Conn
	closed     chan struct{}
	once       sync.Once
}

func newStdioListener() (net.Listener, error) {
	in, out, err := takeStdio()
	if err != nil {
		return nil, err
	}
	l := &stdioListener{connection: make(chan net.Conn, 1), closed: make(chan struct{})}
	l.connection <- &stdioConn{in: in, out: out, closed: func() { l.Close() }}
	return l, nil
}

// takeStdio moves the streams to descriptors that commands don't inherit and that the poller can watch.
func takeStdio() (in, out *os.File, err error) {
	var moved [2]int
	for number := range moved {
		if moved[number], err = syscall.Dup(number); err != nil {
			return nil, nil, err
		}
		syscall.CloseOnExec(moved[number])
		if err = syscall.SetNonblock(moved[number], true); err != nil {
			return nil, nil, err
		}
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer null.Close()
	for number := range moved {
		if err = syscall.Dup3(int(null.Fd()), number, 0); err != nil {
			return nil, nil, err
		}
	}
	return os.NewFile(uintptr(moved[0]), "stdin"), os.NewFile(uintptr(moved[1]), "stdout"), nil
}

func (l *stdioListener) Accept() (net.Conn, error) {
	select {
	case connection := <-l.connection:
		return connection, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *stdioListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *stdioListener) Addr() net.Addr { return stdioAddress{} }

type stdioAddress struct{}

func (stdioAddress) Network() string { return "stdio" }
func (stdioAddress) String() string  { return "stdio" }

type stdioConn struct {
	in, out *os.File
	closed  func()
}

// Read returns a deadline as net/http knows it: wrapped as a file's error it would count as a broken connection.
func (c *stdioConn) Read(data []byte) (int, error) {
	n, err := c.in.Read(data)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = os.ErrDeadlineExceeded
	}
	return n, err
}

func (c *stdioConn) Write(data []byte) (int, error)     { return c.out.Write(data) }
func (c *stdioConn) LocalAddr() net.Addr                { return stdioAddress{} }
func (c *stdioConn) RemoteAddr() net.Addr               { return stdioAddress{} }
func (c *stdioConn) SetReadDeadline(t time.Time) error  { return c.in.SetReadDeadline(t) }
func (c *stdioConn) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }

func (c *stdioConn) SetDeadline(t time.Time) error {
	c.in.SetReadDeadline(t)
	return c.out.SetWriteDeadline(t)
}

func (c *stdioConn) Close() error {
	c.in.Close()
	c.out.Close()
	c.closed()
	return nil
}

// limitListener holds back connections beyond a number, in the kernel's backlog.
type limitListener struct {
	net.Listener
	slots chan struct{}
}

func newLimitListener(l net.Listener, limit int) net.Listener {
	return &limitListener{l, make(chan struct{}, limit)}
}

func (l *limitListener) Accept() (net.Conn, error) {
	l.slots <- struct{}{}
	connection, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitConn{Conn: connection, release: sync.OnceFunc(func() { <-l.slots })}, nil
}

type limitConn struct {
	net.Conn
	release func()
}

func (c *limitConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// CloseWrite lets the server half-close, so that a refusal is read before the connection is reset.
func (c *limitConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// ReadFrom keeps the kernel's own copying of files to sockets where there is one.
func (c *limitConn) ReadFrom(r io.Reader) (int64, error) {
	if direct, ok := c.Conn.(io.ReaderFrom); ok {
		return direct.ReadFrom(r)
	}
	return io.CopyBuffer(struct{ io.Writer }{c.Conn}, struct{ io.Reader }{r}, make([]byte, copyBytes))
}

// connectCommand joins stdin and stdout to a running agent, for backends that only have an exec's streams.
func connectCommand(args []string) error {
	flags := flag.NewFlagSet("connect", flag.ExitOnError)
	target := flags.String("to", "", "unix:PATH or tcp:HOST:PORT")
	if err := flags.Parse(args); err != nil {
		return err
	}
	network, address, found := strings.Cut(*target, ":")
	if !found || (network != "unix" && network != "tcp") {
		return fmt.Errorf("-to %q: want unix:PATH or tcp:HOST:PORT", *target)
	}
	connection, err := net.Dial(network, address)
	if err != nil {
		return err
	}
	defer connection.Close()
	go func() {
		io.Copy(connection, os.Stdin)
		if half, ok := connection.(interface{ CloseWrite() error }); ok {
			half.CloseWrite()
		}
	}()
	_, err = io.Copy(os.Stdout, connection)
	return err
}
