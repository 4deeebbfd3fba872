package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	markerVariable = "ORCHARD_EXEC"
	killTimeout    = 5 * time.Second
	defaultPath    = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// executor starts commands and knows how to end all that one of them started.
type executor struct {
	settings *settings
	reaper   *reaper
	programs *programs
	// groups is looked for at the first command: the launcher may move the agent into its group once it serves.
	groups  func() *groups
	baseEnv []string
	nonce   string
	null    uintptr
	count   atomic.Uint64
}

// execResult is what a command did.
type execResult struct {
	ExitCode  *int    `json:"exit_code"`
	Signal    *int    `json:"signal"`
	TimedOut  bool    `json:"timed_out"`
	Cancelled bool    `json:"cancelled,omitempty"`
	Seconds   float64 `json:"duration_s"`
	// Survivors are processes that could not be killed.
	Survivors     int   `json:"survivors,omitempty"`
	Stdout        int   `json:"stdout"`
	Stderr        int   `json:"stderr"`
	StdoutDropped int64 `json:"stdout_dropped"`
	StderrDropped int64 `json:"stderr_dropped"`

	output [6][]byte
}

func newExecutor(s *settings, r *reaper) (*executor, error) {
	nonce := make([]byte, 8)
	rand.Read(nonce)
	e := &executor{settings: s, reaper: r, programs: newPrograms(s.Programs), groups: sync.OnceValue(func() *groups { return findGroups(s.GroupFd) }), nonce: hex.EncodeToString(nonce)}
	e.baseEnv = mergeEnv([]string{"PATH=" + defaultPath}, os.Environ())
	null, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	e.null = uintptr(null)
	for name, value := range s.Env {
		e.baseEnv = mergeEnv(e.baseEnv, []string{name + "=" + value})
	}
	return e, nil
}

// mergeEnv lets later assignments win, so that programs that take the first of two see the same as those that take the last.
func mergeEnv(base, over []string) []string {
	place := make(map[string]int, len(base)+len(over))
	merged := make([]string, 0, len(base)+len(over))
	for _, list := range [2][]string{base, over} {
		for _, pair := range list {
			name, _, found := strings.Cut(pair, "=")
			if !found || name == "" {
				continue
			}
			if at, ok := place[name]; ok {
				merged[at] = pair
				continue
			}
			place[name] = len(merged)
			merged = append(merged, pair)
		}
	}
	return merged
}

// plan is how a request's command will be started, and how all that it starts will be found again.
type plan struct {
	request *execRequest
	cwd     string
	env     []string
	account *account
	marker  string
	leaf    *leaf
}

// plan makes a leaf for the command, which the caller releases.
func (e *executor) plan(r *execRequest, over ...string) (*plan, error) {
	account, err := e.account(r.head.User)
	if err != nil {
		return nil, err
	}
	p := &plan{request: r, cwd: r.cwd, account: account}
	if !filepath.IsAbs(p.cwd) {
		p.cwd = filepath.Join(e.settings.Workdir, p.cwd)
	}
	p.marker = fmt.Sprintf("%s=%s.%d", markerVariable, e.nonce, e.count.Add(1))
	p.env = mergeEnv(mergeEnv(e.baseEnv, append(account.env(), over...)), append(r.env, p.marker))
	p.leaf = e.groups().leaf()
	return p, nil
}

// run executes a request to the exit of its process. A receive from cancel ends it as a timeout does.
func (e *executor) run(r *execRequest, cancel <-chan struct{}) (*execResult, error) {
	p, err := e.plan(r)
	if err != nil {
		return nil, err
	}
	defer p.leaf.release()
	stdout, stderr := newCapture(r.head.Output), newCapture(r.head.Output)
	result, status, err := e.runInto(p, stdout, stderr, cancel)
	if err != nil {
		return notStarted(p, err)
	}
	result.fill(status, stdout, stderr)
	return result, nil
}

// runInto runs a plan's command to its exit, with what it writes going to the sinks; an error is of its start.
func (e *executor) runInto(
	p *plan, out, err sink, cancel <-chan struct{},
) (result *execResult, status syscall.WaitStatus, failure error) {
	stdout, stdoutWriter, failure := openOutput(out)
	if failure != nil {
		return nil, 0, failure
	}
	stderr, stderrWriter, failure := openOutput(err)
	if failure != nil {
		stdout.pipe.Close()
		syscall.Close(stdoutWriter)
		return nil, 0, failure
	}
	started := time.Now()
	pid, failure := e.start(p, uintptr(stdoutWriter), uintptr(stderrWriter))
	syscall.Close(stdoutWriter)
	syscall.Close(stderrWriter)
	if failure != nil {
		stdout.pipe.Close()
		stderr.pipe.Close()
		return nil, 0, failure
	}
	exited := e.reaper.exit(pid, started)
	go stdout.collect()
	go stderr.collect()
	result, status = e.await(p, pid, started, exited, cancel)
	stdout.finish()
	stderr.finish()
	return result, status, nil
}

// await waits for a command's exit, and kills all that it started at its timeout or when it is cancelled.
func (e *executor) await(
	p *plan, pid int, started time.Time, exited <-chan syscall.WaitStatus, cancel <-chan struct{},
) (result *execResult, status syscall.WaitStatus) {
	result = &execResult{}
	timer := time.NewTimer(p.request.timeout())
	defer timer.Stop()
	select {
	case status = <-exited:
	case <-timer.C:
		result.TimedOut = true
	case <-cancel:
		result.Cancelled = true
	}
	select {
	case status = <-exited:
		// It ended at the same moment: that is an exit.
		result.TimedOut, result.Cancelled = false, false
	default:
	}
	if result.TimedOut || result.Cancelled {
		result.Survivors = e.kill(pid, p)
		select {
		case status = <-exited:
		case <-time.After(killTimeout):
		}
	}
	result.Seconds = time.Since(started).Seconds()
	return result, status
}

// start runs a plan's command with its output on these descriptors.
func (e *executor) start(p *plan, stdout, stderr uintptr) (int, error) {
	files := []uintptr{e.null, stdout, stderr}
	if p.request.stdin != nil {
		files[0] = p.request.stdin.Fd()
	}
	return e.startOn(p, files, &syscall.SysProcAttr{Setsid: true})
}

func (e *executor) startOn(p *plan, files []uintptr, attributes *syscall.SysProcAttr) (int, error) {
	r := p.request
	argv := r.argv
	var script *os.File
	if r.line != nil {
		var err error
		if argv, script, err = lineArgv(r.line); err != nil {
			return 0, err
		}
	}
	if script != nil {
		defer script.Close()
		files = append(files, script.Fd())
	}
	program, err := lookUp(argv[0], p.cwd, p.env)
	if err != nil {
		return 0, err
	}
	if !e.programs.allowsPath(program, p.cwd) {
		return 0, errNotAllowed
	}
	attributes.Credential = p.account.credential
	p.leaf.join(attributes)
	if e.limited() {
		// What can't be run is told by its start, which comes too late here.
		if err := runnable(program, p.cwd); err != nil {
			return 0, err
		}
	}
	program, argv = e.limitedArgv(program, argv)
	return syscall.ForkExec(program, argv, &syscall.ProcAttr{Dir: p.cwd, Env: p.env, Files: files, Sys: attributes})
}

// runnable tells of a program that is not there or can't be executed.
func runnable(program, cwd string) error {
	if !filepath.IsAbs(program) {
		program = filepath.Join(cwd, program)
	}
	info, err := os.Stat(program)
	if err != nil {
		var errno syscall.Errno
		if errors.As(err, &errno) {
			return errno
		}
		return err
	}
	if info.IsDir() || info.Mode()&0o111 == 0 {
		return syscall.EACCES
	}
	return nil
}

// lookUp finds a program as execvp does, on the PATH that the command itself gets.
func lookUp(name, cwd string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	path := defaultPath
	for _, pair := range env {
		if value, ok := strings.CutPrefix(pair, "PATH="); ok {
			path = value
		}
	}
	var denied error = syscall.ENOENT
	for _, folder := range strings.Split(path, ":") {
		candidate := filepath.Join(folder, name)
		if !filepath.IsAbs(candidate) {
			candidate = filepath.Join(cwd, candidate)
		}
		info, err := os.Stat(candidate)
		if err != nil || info.IsDir() {
			continue
		}
		if info.Mode()&0o111 != 0 {
			return candidate, nil
		}
		denied = syscall.EACCES
	}
	return "", denied
}

// notStarted tells a command that can't be run, which reads as a shell would report it, from a request that can't.
func notStarted(p *plan, err error) (*execResult, error) {
	r, cwd := p.request, p.cwd
	if info, statErr := os.Stat(cwd); statErr != nil || !info.IsDir() {
		return nil, refuse(422, "bad_cwd", fmt.Sprintf("the working directory %q is not there or not a directory", cwd))
	}
	errno, ok := err.(syscall.Errno)
	if !ok && err != errNotAllowed {
		return nil, err
	}
	name := "/bin/sh"
	if r.line == nil {
		name = r.argv[0]
	}
	code := 126
	switch errno {
	case 0:
	case syscall.ENOENT, syscall.ENOTDIR:
		code = 127
	case syscall.E2BIG:
		return nil, refuse(413, "too_large", "the arguments and the environment are longer than the kernel allows; send a shell line or a file")
	case syscall.EACCES, syscall.ENOEXEC, syscall.EISDIR, syscall.ELOOP, syscall.ETXTBSY, syscall.ENAMETOOLONG, syscall.EPERM:
	case syscall.EAGAIN, syscall.ENOMEM:
		return nil, refuse(503, "no_resources", "the sandbox can't start another process: "+errno.Error())
	default:
		return nil, errno
	}
	text := newCapture(r.head.Output)
	text.write([]byte(fmt.Sprintf("%s: %s\n", name, err.Error())))
	result := &execResult{}
	result.fill(syscall.WaitStatus(code<<8), newCapture(0), text)
	return result, nil
}

// kill ends all that a command started, and nothing else.
func (e *executor) kill(pid int, p *plan) int {
	deadline := time.Now().Add(killTimeout)
	var since uint64
	if root, ok := readStat(pid, make([]byte, 4096)); ok {
		since = root.started
	}
	p.leaf.kill()
	// After the group as well: the scan is what proves that nobody is left.
	_, left := killUntilStable([]byte(p.marker+"\x00"), since, deadline, startedBy(pid))
	return left
}

// startedBy tells which processes of a scan for its marker are a command's.
func startedBy(pid int) func(*process) bool {
	return func(p *process) bool { return p.pid == pid || p.session == pid || p.group == pid || p.marked }
}

func (r *execResult) fill(status syscall.WaitStatus, stdout, stderr *capture) {
	switch {
	case r.TimedOut || r.Cancelled:
		number := int(syscall.SIGKILL)
		r.Signal = &number
	case status.Signaled():
		number := int(status.Signal())
		r.Signal = &number
	default:
		code := status.ExitStatus()
		r.ExitCode = &code
	}
	r.Stdout, r.Stderr = stdout.kept(), stderr.kept()
	r.StdoutDropped, r.StderrDropped = stdout.dropped(), stderr.dropped()
	for i, parts := range [2][3][]byte{stdout.parts(), stderr.parts()} {
		copy(r.output[3*i:], parts[:])
	}
}

func (r *execResult) size() int { return r.Stdout + r.Stderr }
