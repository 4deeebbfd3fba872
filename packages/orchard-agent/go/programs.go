package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// allowedProgram is an executable that may run inside: its path with links resolved and, when given, its content.
type allowedProgram struct {
	Path   string `json:"path"`
	SHA256 string `json:"sha256"`
}

const (
	programsInterval = 20 * time.Millisecond
	// digestsKept bounds the contents whose hashes are remembered.
	digestsKept = 1024
	// hiddenTicks is for how many looks a process may be unseen.
	hiddenTicks = 5
)

var errNotAllowed = errors.New("it is not among the programs that may run in this sandbox")

// programs kills what may not run. A nil *programs allows everything.
type programs struct {
	allowed map[string][]string
	killed  atomic.Int64

	mu      sync.Mutex
	digests map[fileVersion]string
}

// fileVersion tells a file's content: a change of it sets its change time, which nobody inside can set back.
type fileVersion struct {
	device, inode uint64
	changed       syscall.Timespec
	size          int64
}

func newPrograms(list []allowedProgram) *programs {
	if list == nil {
		return nil
	}
	p := &programs{allowed: map[string][]string{}, digests: map[fileVersion]string{}}
	for _, one := range list {
		p.allowed[one.Path] = append(p.allowed[one.Path], one.SHA256)
	}
	return p
}

func (p *programs) count() int64 {
	if p == nil {
		return 0
	}
	return p.killed.Load()
}

// allowsPath tells of a program that is to be started; what it starts itself, the watch sees.
func (p *programs) allowsPath(program, cwd string) bool {
	if p == nil {
		return true
	}
	if !filepath.IsAbs(program) {
		program = filepath.Join(cwd, program)
	}
	real, err := filepath.EvalSymlinks(program)
	if err != nil {
		// It is not there; its start says so.
		return true
	}
	file, err := os.Open(real)
	if err != nil {
		return p.allows(real, nil)
	}
	defer file.Close()
	start := make([]byte, 2)
	if n, _ := io.ReadFull(file, start); n == 2 && string(start) == "#!" {
		// What counts is its interpreter, which runs in its place.
		return true
	}
	return p.allows(real, file)
}

func (p *programs) allows(path string, content *os.File) bool {
	digests, known := p.allowed[path]
	if !known {
		return false
	}
	actual := ""
	for _, wanted := range digests {
		if wanted == "" {
			return true
		}
		if actual == "" && content != nil {
			actual = p.digest(content)
		}
		if actual == wanted {
			return true
		}
	}
	return false
}

func (p *programs) digest(file *os.File) string {
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return ""
	}
	stat := info.Sys().(*syscall.Stat_t)
	version := fileVersion{uint64(stat.Dev), stat.Ino, stat.Ctim, stat.Size}
	p.mu.Lock()
	known, found := p.digests[version]
	p.mu.Unlock()
	if found {
		return known
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, io.NewSectionReader(file, 0, stat.Size)); err != nil {
		return ""
	}
	digest := hex.EncodeToString(hash.Sum(nil))
	p.mu.Lock()
	if len(p.digests) >= digestsKept {
		clear(p.digests)
	}
	p.digests[version] = digest
	p.mu.Unlock()
	return digest
}

// watch looks at all processes inside again and again, and kills those that may not run.
func (p *programs) watch(ownsNamespace bool) {
	if p == nil {
		return
	}
	own, _ := os.ReadFile("/proc/self/cmdline")
	self := os.Getpid()
	all := ownsNamespace || self == 1
	// A process that has passed stays so until it replaces its program, which changes its executable's identity.
	passed := map[int]identity{}
	// How often a process's executable could not be seen, in a row.
	hidden := map[int]int{}
	for range time.Tick(programsInterval) {
		found, err := scan(nil)
		if err != nil {
			continue
		}
		members := closure(found, self, func(one *process) bool {
			return one.parent == self || (all && one.pid != 1)
		})
		for pid := range passed {
			if _, alive := members[pid]; !alive {
				delete(passed, pid)
			}
		}
		next := map[int]int{}
		for pid, started := range members {
			now, ok := identify(pid, started)
			if ok && passed[pid] == now {
				continue
			}
			allowed, seen := p.mayRun(pid, own)
			if !seen && hidden[pid] < hiddenTicks {
				next[pid] = hidden[pid] + 1
				continue
			}
			if !allowed {
				delete(passed, pid)
				if syscall.Kill(pid, syscall.SIGKILL) == nil {
					p.killed.Add(1)
				}
				continue
			}
			if ok {
				passed[pid] = now
			}
		}
		hidden = next
	}
}

// identity is a process with the executable that it runs.
type identity struct {
	started       uint64
	device, inode uint64
	changed       syscall.Timespec
}

func identify(pid int, started uint64) (identity, bool) {
	var stat syscall.Stat_t
	if err := syscall.Stat("/proc/"+strconv.Itoa(pid)+"/exe", &stat); err != nil {
		return identity{}, false
	}
	return identity{started, uint64(stat.Dev), stat.Ino, stat.Ctim}, true
}

// mayRun judges a process by its executable; one that replaces its program meanwhile is judged by the new one. A
// process that was just forked can't be seen, for it still has the agent's memory; one that hides stays unseen.
func (p *programs) mayRun(pid int, own []byte) (allowed, seen bool) {
	link := "/proc/" + strconv.Itoa(pid) + "/exe"
	for range 8 {
		path, err := os.Readlink(link)
		if err != nil {
			one, there := readStat(pid, make([]byte, 4096))
			ended := !there || !one.alive()
			return ended, ended
		}
		if p.mayRunAs(pid, path, own) {
			return true, true
		}
		if now, err := os.Readlink(link); err == nil && now == path {
			return false, true
		}
	}
	return false, true
}

func (p *programs) mayRunAs(pid int, path string, own []byte) bool {
	folder := "/proc/" + strconv.Itoa(pid)
	file, err := os.Open(folder + "/exe")
	if err == nil {
		defer file.Close()
	}
	if p.allows(path, file) {
		return true
	}
	// A command that is just being started still shows the agent's program and arguments.
	if mine, err := os.Readlink("/proc/self/exe"); err == nil && mine == path {
		line, _ := os.ReadFile(folder + "/cmdline")
		// One whose arguments aren't there yet is between two programs.
		return len(line) == 0 || bytes.Equal(line, own) || bytes.HasPrefix(line, []byte(limitedName+"\x00limited\x00"))
	}
	return false
}
