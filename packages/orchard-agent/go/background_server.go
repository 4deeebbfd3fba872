package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"
)

const (
	maxOutputRead = 1 << 20
	maxStdinWrite = 1 << 20
)

func (s *server) startBackground(w http.ResponseWriter, r *http.Request) error {
	limit, err := strconv.ParseInt(r.URL.Query().Get("output_limit"), 10, 64)
	if err != nil || limit < 0 || limit > maxSpill {
		return refuse(400, "bad_request", "output_limit must be 0 to "+strconv.Itoa(maxSpill))
	}
	request, err := readExecRequest(r.Body)
	if err != nil {
		return err
	}
	defer request.close()
	one, err := s.shelf.start(request, r.URL.Query().Get("stdin") == "1", limit)
	if err != nil {
		return err
	}
	answerJSON(w, map[string]any{"id": one.id})
	return nil
}

func (s *server) process(r *http.Request) (*background, error) {
	return s.shelf.find(r.URL.Query().Get("id"))
}

// waitTime is how long a request wants to wait, within what one request may.
func waitTime(r *http.Request) <-chan time.Time {
	seconds, err := strconv.ParseFloat(r.URL.Query().Get("wait_s"), 64)
	if err != nil || !(seconds > 0) {
		seconds = 0
	}
	return time.After(time.Duration(min(seconds, waitMost.Seconds()) * float64(time.Second)))
}

// backgroundOutput answers with a JSON head, its length before it, and the bytes.
func (s *server) backgroundOutput(w http.ResponseWriter, r *http.Request) error {
	one, err := s.process(r)
	if err != nil {
		return err
	}
	offset, err := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	if err != nil || offset < 0 {
		return refuse(400, "bad_request", "offset must be 0 or more")
	}
	limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
	if err != nil || limit < 0 {
		return refuse(400, "bad_request", "limit must be 0 or more")
	}
	limit = min(limit, maxOutputRead)
	timeout := waitTime(r)
	for waiting := limit > 0; waiting; {
		more := one.spill.next()
		_, end := one.spill.bounds()
		if offset > end {
			return refuse(409, "bad_offset", "offset "+strconv.FormatInt(offset, 10)+" is after the end of the output, "+strconv.FormatInt(end, 10))
		}
		if offset < end || isClosed(one.ended) {
			break
		}
		select {
		case <-more:
		case <-timeout:
			waiting = false
		case <-r.Context().Done():
			return nil
		}
	}
	// Read before the bytes: what ends afterwards is told next time.
	ended := isClosed(one.ended)
	_, end := one.spill.bounds()
	buffer := make([]byte, min(int64(limit), max(0, end-offset)))
	start, n, err := one.spill.read(buffer, offset)
	if errors.Is(err, os.ErrClosed) {
		return refuse(404, "no_process", "this background process was forgotten")
	}
	if err != nil {
		return err
	}
	ended = ended && start+int64(n) == end
	head, err := json.Marshal(map[string]any{"offset": start, "ended": ended})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(4+len(head)+n))
	w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(head))), head...))
	w.Write(buffer[:n])
	return nil
}

// backgroundStdin writes what the process takes in the time of one request, and says how much that was.
func (s *server) backgroundStdin(w http.ResponseWriter, r *http.Request) error {
	one, err := s.process(r)
	if err != nil {
		return err
	}
	data, err := io.ReadAll(io.LimitReader(r.Body, maxStdinWrite+1))
	if err != nil {
		return refuse(400, "bad_request", "the body ended early")
	}
	if len(data) > maxStdinWrite {
		return refuse(413, "too_large", "write at most "+strconv.Itoa(maxStdinWrite)+" bytes at once")
	}
	var input *os.File
	select {
	case input = <-one.stdin:
	case <-r.Context().Done():
		return nil
	case <-time.After(waitMost):
		return refuse(429, "busy", "another write to this process's stdin still waits")
	}
	keep := input
	defer func() { one.stdin <- keep }()
	if input == nil {
		return refuse(409, "stdin_closed", "this process has no stdin, or it is closed")
	}
	input.SetWriteDeadline(time.Now().Add(waitMost))
	written, err := input.Write(data)
	if errors.Is(err, syscall.EPIPE) {
		input.Close()
		keep = nil
		return refuse(409, "stdin_closed", "this process closed its stdin")
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	if r.URL.Query().Get("eof") == "1" && written == len(data) {
		input.Close()
		keep = nil
	}
	answerJSON(w, map[string]any{"written": written})
	return nil
}

func (s *server) signalBackground(w http.ResponseWriter, r *http.Request) error {
	one, err := s.process(r)
	if err != nil {
		return err
	}
	number, err := strconv.Atoi(r.URL.Query().Get("signal"))
	if err != nil || number < 1 || number > 64 {
		return refuse(400, "bad_request", "signal must be 1 to 64")
	}
	if err := s.shelf.signal(one, syscall.Signal(number), r.URL.Query().Get("tree") == "1"); err != nil {
		return err
	}
	answerJSON(w, map[string]any{})
	return nil
}

func (s *server) forgetBackground(w http.ResponseWriter, r *http.Request) error {
	answerJSON(w, map[string]any{"left": s.shelf.forget(r.URL.Query().Get("id"))})
	return nil
}

func (s *server) waitBackground(w http.ResponseWriter, r *http.Request) error {
	one, err := s.process(r)
	if err != nil {
		return err
	}
	select {
	case <-one.exited:
	case <-waitTime(r):
	case <-r.Context().Done():
		return nil
	}
	answerJSON(w, one.info())
	return nil
}

func (s *server) listBackground(w http.ResponseWriter, _ *http.Request) error {
	found := []map[string]any{}
	for _, one := range s.shelf.list() {
		found = append(found, one.info())
	}
	answerJSON(w, map[string]any{"processes": found})
	return nil
}

func (b *background) info() map[string]any {
	start, end := b.spill.bounds()
	info := map[string]any{
		"id": b.id, "command": b.name, "running": !isClosed(b.exited), "started_at": float64(b.started.UnixNano()) / 1e9,
		"output_start": start, "output_end": end, "exit_code": nil, "signal": nil,
	}
	if isClosed(b.exited) {
		if b.status.Signaled() {
			info["signal"] = int(b.status.Signal())
		} else {
			info["exit_code"] = b.status.ExitStatus()
		}
	}
	return info
}
