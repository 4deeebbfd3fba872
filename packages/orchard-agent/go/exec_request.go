package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
	"unsafe"
)

const (
	maxHead        = 256 << 10
	maxCommand     = 64 << 20
	maxEnvironment = 2 << 20
	maxStdin       = 4 << 30
	maxOutput      = 64 << 20
	maxTimeout     = 30 * 24 * time.Hour
	// pipeBytes is what a fresh pipe takes without a reader.
	pipeBytes = 64 << 10
	// argumentBytes is the kernel's limit for a single argument, its end included.
	argumentBytes = 128 << 10
)

// execHead is the JSON that opens an exec's body. The parts that it gives the lengths of follow it as raw bytes, in
// the order of the fields: so no command and no environment is too long or too strange for JSON.
type execHead struct {
	Key       string  `json:"key"`
	TimeoutMs float64 `json:"timeout_ms"`
	Output    int     `json:"output_limit"`
	User      string  `json:"user"`
	Cwd       int     `json:"cwd"`
	Env       int     `json:"env"`
	Argv      []int   `json:"argv"`
	Line      *int    `json:"line"`
	Stdin     *int64  `json:"stdin"`
}

type execRequest struct {
	head  execHead
	cwd   string
	env   []string
	argv  []string
	line  []byte
	stdin *os.File
}

func (r *execRequest) timeout() time.Duration {
	return time.Duration(r.head.TimeoutMs * float64(time.Millisecond))
}

func (r *execRequest) close() {
	if r.stdin != nil {
		r.stdin.Close()
	}
}

func readExecRequest(body io.Reader) (*execRequest, error) {
	var size [4]byte
	if _, err := io.ReadFull(body, size[:]); err != nil {
		return nil, refuse(400, "bad_request", "the body ended before its head")
	}
	length := binary.BigEndian.Uint32(size[:])
	if length > maxHead {
		return nil, refuse(413, "too_large", fmt.Sprintf("the head has %d bytes; the limit is %d", length, maxHead))
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(body, text); err != nil {
		return nil, refuse(400, "bad_request", "the body ended in its head")
	}
	request := &execRequest{}
	if err := json.Unmarshal(text, &request.head); err != nil {
		return nil, refuse(400, "bad_request", "the head is not the JSON of an exec: "+err.Error())
	}
	if err := request.head.check(); err != nil {
		return nil, err
	}
	if err := request.readParts(body); err != nil {
		request.close()
		return nil, err
	}
	return request, nil
}

func (h *execHead) check() error {
	total := 0
	for _, part := range h.Argv {
		if part < 0 || part > maxCommand {
			return refuse(413, "too_large", "an argument's length is out of range")
		}
		total += part
	}
	if h.Line != nil {
		if *h.Line < 0 || *h.Line > maxCommand {
			return refuse(413, "too_large", fmt.Sprintf("the command line is longer than %d bytes", maxCommand))
		}
		total += *h.Line
	}
	switch {
	case total > maxCommand:
		return refuse(413, "too_large", fmt.Sprintf("the command is longer than %d bytes", maxCommand))
	case (h.Line == nil) == (len(h.Argv) == 0):
		return refuse(400, "bad_request", "give either argv or line")
	case h.Cwd < 0 || h.Cwd > 4096:
		return refuse(413, "too_large", "the working directory's path is too long")
	case h.Env < 0 || h.Env > maxEnvironment:
		return refuse(413, "too_large", fmt.Sprintf("the environment is larger than %d bytes", maxEnvironment))
	case h.Stdin != nil && (*h.Stdin < 0 || *h.Stdin > maxStdin):
		return refuse(413, "too_large", fmt.Sprintf("stdin is larger than %d bytes", int64(maxStdin)))
	case h.Output < 0 || h.Output > maxOutput:
		return refuse(413, "too_large", fmt.Sprintf("output_limit must be 0 to %d", maxOutput))
	case !(h.TimeoutMs > 0) || h.TimeoutMs > float64(maxTimeout.Milliseconds()):
		return refuse(400, "bad_request", "timeout_ms must be more than 0 and at most 30 days")
	case len(h.Key) > 256:
		return refuse(400, "bad_request", "a key has at most 256 characters")
	}
	return nil
}

func (r *execRequest) readParts(body io.Reader) error {
	part := func(length int) ([]byte, error) {
		data := make([]byte, length)
		if _, err := io.ReadFull(body, data); err != nil {
			return nil, refuse(400, "bad_request", "the body ended before its parts")
		}
		return data, nil
	}
	cwd, err := part(r.head.Cwd)
	if err != nil {
		return err
	}
	r.cwd = string(cwd)
	env, err := part(r.head.Env)
	if err != nil {
		return err
	}
	for _, pair := range bytes.Split(env, []byte{0}) {
		if len(pair) > 0 {
			r.env = append(r.env, string(pair))
		}
	}
	for _, length := range r.head.Argv {
		argument, err := part(length)
		if err != nil {
			return err
		}
		r.argv = append(r.argv, string(argument))
	}
	if r.head.Line != nil {
		if r.line, err = part(*r.head.Line); err != nil {
			return err
		}
	}
	for _, text := range append([]string{r.cwd, string(r.line)}, r.argv...) {
		if bytes.IndexByte([]byte(text), 0) >= 0 {
			return refuse(400, "bad_request", "a command can't hold a NUL byte")
		}
	}
	if r.head.Stdin != nil {
		r.stdin, err = stageStdin(body, *r.head.Stdin)
	}
	return err
}

// stageStdin takes all of stdin before the command starts, so that a command that doesn't read it holds up nobody,
// and the connection is free to tell that the client went away.
func stageStdin(body io.Reader, size int64) (*os.File, error) {
	if size <= pipeBytes {
		data := make([]byte, size)
		if _, err := io.ReadFull(body, data); err != nil {
			return nil, refuse(400, "bad_request", "the body ended in stdin")
		}
		var ends [2]int
		if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC); err != nil {
			return nil, err
		}
		defer syscall.Close(ends[1])
		reader := os.NewFile(uintptr(ends[0]), "stdin")
		if _, err := syscall.Write(ends[1], data); err != nil {
			reader.Close()
			return nil, err
		}
		return reader, nil
	}
	file, _, err := anonymousFile("stdin")
	if err != nil {
		return nil, err
	}
	n, err := io.Copy(file, io.LimitReader(body, size))
	if err == nil && n < size {
		err = refuse(400, "bad_request", "the body ended in stdin")
	}
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// anonymousFile is on disk where the temporary folder can have nameless files, else in memory.
func anonymousFile(name string) (file *os.File, inMemory bool, err error) {
	const tmpfile = 0o20200000
	fd, err := syscall.Open(os.TempDir(), tmpfile|syscall.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		file, err = memoryFile(name)
		return file, true, err
	}
	return os.NewFile(uintptr(fd), name), false, nil
}

func memoryFile(name string) (*os.File, error) {
	text, err := syscall.BytePtrFromString(name)
	if err != nil {
		return nil, err
	}
	fd, _, errno := syscall.Syscall(sysMemfdCreate, uintptr(unsafe.Pointer(text)), 1, 0)
	if errno != 0 {
		return nil, errno
	}
	return os.NewFile(fd, name), nil
}

// lineArgv makes a shell line's argv; a line too long for one argument becomes a file that the shell reads.
func lineArgv(line []byte) (argv []string, script *os.File, err error) {
	if len(line) < argumentBytes {
		return []string{"/bin/sh", "-c", string(line)}, nil, nil
	}
	script, err = memoryFile("script")
	if err != nil {
		return nil, nil, err
	}
	if _, err = script.Write(line); err != nil {
		script.Close()
		return nil, nil, err
	}
	return []string{"/bin/sh", "/proc/self/fd/3"}, script, nil
}
