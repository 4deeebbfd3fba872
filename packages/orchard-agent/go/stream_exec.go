package main

import (
	"io"
	"net/http"
	"strconv"
	"syscall"
)

// The agent's frames of a streamed command or a terminal.
const (
	frameData    = 0
	frameStdout  = 1
	frameStderr  = 2
	frameResult  = 3
	frameTyped   = 4
	frameFailure = 5
)

// slot takes one of the places for running commands; the returned function gives it back.
func (s *server) slot() (func(), error) {
	select {
	case s.slots <- struct{}{}:
		s.execs.Add(1)
		return func() { <-s.slots }, nil
	default:
		return nil, refuse(429, "too_many_execs", "too many commands run at once; the limit is "+strconv.Itoa(cap(s.slots)))
	}
}

// streamExec runs a command and sends its output as it comes. A client that goes away ends the command.
func (s *server) streamExec(w http.ResponseWriter, r *http.Request) error {
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
	plan, err := s.executor.plan(request)
	if err != nil {
		return err
	}
	defer plan.leaf.release()
	connection, err := upgrade(w, r)
	if err != nil {
		return err
	}
	defer connection.Close()
	cancel := make(chan struct{})
	go func() {
		// The client says nothing more: whatever comes is its end.
		io.ReadFull(connection, make([]byte, 1))
		close(cancel)
		// Nobody reads any more: output that still waits must not hold the command's end up.
		connection.Close()
	}()
	frames := &frameWriter{to: connection}
	result, status, err := s.executor.runInto(
		plan, &frameSink{frames, frameStdout}, &frameSink{frames, frameStderr}, cancel)
	sendResult(frames, plan, result, status, err)
	return nil
}

// sendResult ends a stream's frames with what its command did, or why it was not started.
func sendResult(frames *frameWriter, p *plan, result *execResult, status syscall.WaitStatus, err error) {
	if err == nil {
		result.fill(status, newCapture(0), newCapture(0))
		frames.writeJSON(frameResult, result)
		return
	}
	if result, err = notStarted(p, err); err != nil {
		frames.writeJSON(frameFailure, asFailure(err))
		return
	}
	for _, part := range result.output {
		if len(part) > 0 {
			frames.write(frameStderr, part)
		}
	}
	result.Stdout, result.Stderr, result.StdoutDropped, result.StderrDropped = 0, 0, 0, 0
	frames.writeJSON(frameResult, result)
}
