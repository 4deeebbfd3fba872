package main

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"errors"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	maxHeaderBytes = 32 << 10
	maxConnections = 512
)

type server struct {
	settings *settings
	executor *executor
	kept     *kept
	shelf    *shelf
	reverse  *reverse
	life     *life
	slots    chan struct{}
	started  time.Time
	execs    atomic.Int64
}

func serveCommand(args []string) error {
	s, err := parseSettings(args)
	if err != nil {
		return err
	}
	return serve(s)
}

func serve(s *settings) error {
	listener, err := openListener(s.listen)
	if err != nil {
		return err
	}
	life := newLife(s.ttl(), func(code int) { endSandbox(s, code) })
	if err := harden(s, func() { life.end(0) }); err != nil {
		return err
	}
	reaper := newReaper()
	go reaper.run()
	executor, err := newExecutor(s, reaper)
	if err != nil {
		return err
	}
	one := &server{
		settings: s, executor: executor, kept: newKept(), shelf: newShelf(executor), reverse: newReverse(), life: life,
		slots: make(chan struct{}, s.MaxExecs), started: time.Now(),
	}
	s.watchLifeline(func() { life.end(0) })
	go life.watch()
	go executor.programs.watch(s.OwnsNamespace)
	plain := &http.Server{
		Handler:           one.handler(),
		MaxHeaderBytes:    maxHeaderBytes,
		ReadHeaderTimeout: 20 * time.Second,
		IdleTimeout:       10 * time.Minute,
		ErrorLog:          log.New(&boundedLog{left: 64 << 10}, "", 0),
	}
	s.announce()
	err = plain.Serve(newLimitListener(listener, maxConnections))
	if errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	life.end(0)
	return err
}

// endSandbox kills what is left and exits: as PID 1 the kernel does the former.
func endSandbox(s *settings, code int) {
	quiesce(s.OwnsNamespace, 3*time.Second)
	os.Exit(code)
}

// boundedLog keeps a hostile client from filling the log.
type boundedLog struct{ left int }

func (b *boundedLog) Write(text []byte) (int, error) {
	if b.left -= len(text); b.left > 0 {
		os.Stderr.Write(text)
	}
	return len(text), nil
}

// releaseKey finds the function that ends a request's being a sign of life.
type releaseKey struct{}

type endpoint func(w http.ResponseWriter, r *http.Request) error

func (s *server) handler() http.Handler {
	endpoints := map[string]endpoint{
		"GET /v1/health":  s.health,
		"POST /v1/renew":  s.renew,
		"POST /v1/exec":   s.exec,
		"POST /v1/cancel": s.cancel,
		"POST /v1/kill":   s.killAll,
		"POST /v1/stream": s.streamExec,
		"POST /v1/pty":    s.terminal,

		"POST /v1/process":        s.startBackground,
		"POST /v1/process/stdin":  s.backgroundStdin,
		"POST /v1/process/signal": s.signalBackground,
		"POST /v1/process/forget": s.forgetBackground,
		"GET /v1/process/output":  s.backgroundOutput,
		"GET /v1/process/wait":    s.waitBackground,
		"GET /v1/process/list":    s.listBackground,

		"POST /v1/port/connect": s.connectPort,
		"POST /v1/port/serve":   s.servePort,
		"POST /v1/port/accept":  s.acceptPort,
		"POST /v1/port/reject":  s.rejectPort,

		"GET /v1/file":    s.readFile,
		"PUT /v1/file":    s.writeFile,
		"GET /v1/tar":     s.tarOut,
		"PUT /v1/tar":     s.tarIn,
		"GET /v1/list":    s.list,
		"GET /v1/stat":    s.stat,
		"POST /v1/mkdir":  s.makeDir,
		"POST /v1/remove": s.remove,
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		hash := sha256.Sum256([]byte(given))
		if !found || subtle.ConstantTimeCompare(hash[:], s.settings.tokenHash[:]) != 1 {
			asRefusal(refuse(http.StatusUnauthorized, "unauthorized", "the bearer token is missing or wrong")).answer(w)
			return
		}
		release := sync.OnceFunc(s.life.busy())
		defer release()
		handle, known := endpoints[r.Method+" "+r.URL.Path]
		if !known {
			asRefusal(refuse(http.StatusNotFound, "unknown_endpoint", r.Method+" "+r.URL.Path+" is not an endpoint")).answer(w)
			return
		}
		if err := handle(w, r.WithContext(context.WithValue(r.Context(), releaseKey{}, release))); err != nil {
			refused := asRefusal(err)
			if refused.status == http.StatusRequestEntityTooLarge || refused.status == http.StatusTooManyRequests {
				// What is left of the body is not worth reading.
				w.Header().Set("Connection", "close")
			}
			refused.answer(w)
		}
	})
}

func (s *server) health(w http.ResponseWriter, _ *http.Request) error {
	answerJSON(w, map[string]any{
		"version": version, "uptime_s": time.Since(s.started).Seconds(), "running": len(s.slots),
		"execs": s.execs.Load(), "ttl_s": s.life.left().Seconds(),
		"workdir": quote(s.settings.Workdir), "instance": s.executor.nonce,
		"killed_programs": s.executor.programs.count(),
	})
	return nil
}

func (s *server) renew(w http.ResponseWriter, r *http.Request) error {
	seconds, err := strconv.ParseFloat(r.URL.Query().Get("ttl_s"), 64)
	if err != nil || !(seconds > 0) || seconds > 1e9 {
		return refuse(400, "bad_request", "ttl_s must be a number of seconds above 0")
	}
	s.life.renew(time.Duration(seconds * float64(time.Second)))
	answerJSON(w, map[string]any{"ttl_s": seconds})
	return nil
}

func (s *server) killAll(w http.ResponseWriter, _ *http.Request) error {
	killed, left := quiesce(s.settings.OwnsNamespace, killTimeout)
	answerJSON(w, map[string]any{"killed": killed, "left": left})
	return nil
}

func (s *server) cancel(w http.ResponseWriter, r *http.Request) error {
	key := r.URL.Query().Get("key")
	if key == "" || len(key) > 256 {
		return refuse(400, "bad_request", "key must have 1 to 256 characters")
	}
	command := s.kept.cancelKey(key)
	select {
	case <-command.done:
	case <-r.Context().Done():
	}
	answerJSON(w, map[string]any{})
	return nil
}

func (s *server) exec(w http.ResponseWriter, r *http.Request) error {
	request, err := readExecRequest(r.Body)
	if err != nil {
		return err
	}
	command, fresh, err := s.kept.claim(request.head.Key, fingerprint(request))
	if err != nil {
		request.close()
		return err
	}
	if fresh {
		s.launch(command, request)
	} else {
		request.close()
	}
	select {
	case <-command.done:
	case <-r.Context().Done():
		s.kept.detach(command, false)
		return nil
	}
	if command.err != nil {
		s.kept.detach(command, true)
		return command.err
	}
	err = writeResult(w, r.Context(), command.result)
	s.kept.detach(command, err == nil)
	return nil
}

// launch runs a command in the background of its request, which may go away and come back.
func (s *server) launch(command *running, request *execRequest) {
	free, err := s.slot()
	if err != nil {
		request.close()
		s.kept.finish(command, nil, err)
		s.kept.drop(command)
		return
	}
	go func() {
		defer free()
		result, err := s.executor.run(request, command.cancel)
		request.close()
		s.kept.finish(command, result, err)
	}()
}

// writeResult answers with a JSON head, its length before it, and the kept output as raw bytes.
func writeResult(w http.ResponseWriter, ctx context.Context, result *execResult) error {
	head, err := json.Marshal(result)
	if err != nil {
		return err
	}
	header := w.Header()
	header.Set("Content-Type", "application/octet-stream")
	header.Set("Content-Length", strconv.Itoa(4+len(head)+result.size()))
	if _, err := w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(head))), head...)); err != nil {
		return err
	}
	for _, part := range result.output {
		if _, err := w.Write(part); err != nil {
			return err
		}
	}
	if err := http.NewResponseController(w).Flush(); err != nil {
		return err
	}
	return ctx.Err()
}
