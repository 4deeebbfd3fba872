package main

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	maxRunning = 64
	maxKnown   = 256
	nameBytes  = 200
)

// background is a process that outlives the request that started it.
type background struct {
	id, name string
	key      string
	print    [32]byte
	plan     *plan
	pid      int
	started  time.Time
	spill    *spill
	// exited is closed once the process is gone, and its status can be read; ended once nobody holds its output either.
	exited, ended chan struct{}
	status        syscall.WaitStatus
	// stdin is the writing end, taken by one writer at a time.
	stdin chan *os.File
}

// Write of an output's sink.
func (b *background) write(data []byte) { b.spill.write(data) }

func isClosed(channel <-chan struct{}) bool {
	select {
	case <-channel:
		return true
	default:
		return false
	}
}

// shelf holds the background processes of a sandbox.
type shelf struct {
	executor *executor
	mu       sync.Mutex
	count    int
	known    []*background
}

func newShelf(e *executor) *shelf { return &shelf{executor: e} }

func (s *shelf) list() []*background {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*background(nil), s.known...)
}

func (s *shelf) find(id string) (*background, error) {
	for _, one := range s.list() {
		if one.id == id {
			return one, nil
		}
	}
	return nil, refuse(404, "no_process", "there is no background process "+strconv.Quote(id[:min(len(id), 64)]))
}

// take removes a process from the shelf; it is the caller's to end.
func (s *shelf) take(id string) *background {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, one := range s.known {
		if one.id == id {
			s.known = append(s.known[:at:at], s.known[at+1:]...)
			return one
		}
	}
	return nil
}

// start runs a request in the background; a key that is known returns the process that it started.
func (s *shelf) start(r *execRequest, withStdin bool, limit int64) (*background, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	print := fingerprint(r)
	running := 0
	for _, one := range s.known {
		if r.head.Key != "" && one.key == r.head.Key {
			if one.print != print {
				return nil, refuse(409, "key_reused", "this key was used for another command")
			}
			return one, nil
		}
		if !isClosed(one.ended) {
			running++
		}
	}
	if running >= maxRunning {
		return nil, refuse(429, "too_many_processes", "too many background processes run; the limit is "+strconv.Itoa(maxRunning))
	}
	for at := 0; len(s.known) >= maxKnown && at < len(s.known); at++ {
		if isClosed(s.known[at].ended) {
			s.known[at].spill.close()
			s.known = append(s.known[:at:at], s.known[at+1:]...)
			break
		}
	}
	s.count++
	one := &background{
		id: "p" + strconv.Itoa(s.count), name: commandName(r), key: r.head.Key, print: print, started: time.Now(),
		exited: make(chan struct{}), ended: make(chan struct{}), stdin: make(chan *os.File, 1),
	}
	if err := s.launch(one, r, withStdin, limit); err != nil {
		return nil, err
	}
	s.known = append(s.known, one)
	return one, nil
}

func commandName(r *execRequest) string {
	name := r.line
	if name == nil {
		name = []byte(strings.Join(r.argv, " "))
	}
	name = bytes.ToValidUTF8(name[:min(len(name), nameBytes)], []byte("?"))
	return string(name)
}

func (s *shelf) launch(one *background, r *execRequest, withStdin bool, limit int64) (err error) {
	if one.plan, err = s.executor.plan(r); err != nil {
		return err
	}
	if one.spill, err = newSpill(limit); err != nil {
		one.plan.leaf.release()
		return err
	}
	defer func() {
		if err != nil {
			one.spill.close()
			one.plan.leaf.release()
		}
	}()
	var input *os.File
	if withStdin {
		var ends [2]int
		if err = syscall.Pipe2(ends[:], syscall.O_CLOEXEC); err != nil {
			return err
		}
		if err = syscall.SetNonblock(ends[1], true); err != nil {
			return err
		}
		input = os.NewFile(uintptr(ends[1]), "stdin")
		r.close()
		r.stdin = os.NewFile(uintptr(ends[0]), "stdin")
	}
	defer func() {
		if err != nil && input != nil {
			input.Close()
		}
	}()
	out, writer, err := openOutput(one)
	if err != nil {
		return err
	}
	one.pid, err = s.executor.start(one.plan, uintptr(writer), uintptr(writer))
	syscall.Close(writer)
	if err != nil {
		out.pipe.Close()
		return s.launchFailed(one, input, err)
	}
	one.stdin <- input
	exited := s.executor.reaper.exit(one.pid, one.started)
	go out.collect()
	go func() {
		one.status = <-exited
		close(one.exited)
		one.spill.wake()
		<-out.ended
		out.pipe.Close()
		one.plan.leaf.release()
		close(one.ended)
		one.spill.wake()
	}()
	return nil
}

// launchFailed makes of a command that can't be run a process that has exited with the code that a shell would give.
func (s *shelf) launchFailed(one *background, input *os.File, err error) error {
	result, err := notStarted(one.plan, err)
	if err != nil {
		return err
	}
	if input != nil {
		input.Close()
	}
	one.stdin <- nil
	for _, part := range result.output {
		one.spill.write(part)
	}
	one.status = syscall.WaitStatus(*result.ExitCode << 8)
	one.plan.leaf.release()
	close(one.exited)
	close(one.ended)
	return nil
}

// signal sends to the process group, or to all that the process started.
func (s *shelf) signal(one *background, number syscall.Signal, tree bool) error {
	if !tree {
		if !isClosed(one.exited) {
			syscall.Kill(-one.pid, number)
		}
		return nil
	}
	found, err := scan([]byte(one.plan.marker + "\x00"))
	if err != nil {
		return err
	}
	for pid := range closure(found, os.Getpid(), one.owns()) {
		syscall.Kill(pid, number)
	}
	return nil
}

// owns tells its processes in a scan for its marker. After its exit its id may be another's.
func (b *background) owns() func(*process) bool {
	if isClosed(b.exited) {
		return func(p *process) bool { return p.marked }
	}
	return startedBy(b.pid)
}

// forget kills a process with all that it started and drops its output.
func (s *shelf) forget(id string) int {
	one := s.take(id)
	if one == nil {
		return 0
	}
	left := 0
	if one.pid > 0 {
		one.plan.leaf.kill()
		_, left = killUntilStable([]byte(one.plan.marker+"\x00"), 0, time.Now().Add(killTimeout), one.owns())
	}
	if input := <-one.stdin; input != nil {
		input.Close()
	}
	one.stdin <- nil
	one.spill.close()
	return left
}
