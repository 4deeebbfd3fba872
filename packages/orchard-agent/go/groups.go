package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// groups makes a cgroup v2 leaf for each command below a group that the agent may write: one whose folder it was
// handed, or its own. A nil *groups makes none.
type groups struct {
	folder int
	count  atomic.Uint64
	mu     sync.Mutex
	// old are leaves of commands that ended while children of theirs lived on.
	old []string
}

// leaf is one command's cgroup; a nil *leaf is none.
type leaf struct {
	groups *groups
	name   string
	folder int
}

const openFolder = syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_CLOEXEC

func findGroups(handed int) *groups {
	if handed > 0 {
		syscall.CloseOnExec(handed)
		return usable(handed)
	}
	for _, folder := range ownGroups() {
		fd, err := syscall.Open(folder, openFolder, 0)
		if err != nil {
			continue
		}
		if g := usable(fd); g != nil {
			return g
		}
		syscall.Close(fd)
	}
	return nil
}

// ownGroups are the places where the agent's own cgroup v2 may be mounted.
func ownGroups() []string {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	for _, line := range strings.Split(string(text), "\n") {
		if path, found := strings.CutPrefix(line, "0::"); found {
			return []string{filepath.Join("/sys/fs/cgroup", path), filepath.Join("/sys/fs/cgroup/unified", path)}
		}
	}
	return nil
}

// usable tries to put a process into a leaf, for a group that can be written isn't enough to move from another one.
func usable(folder int) *groups {
	g := &groups{folder: folder}
	probe := g.leaf()
	if probe == nil {
		return nil
	}
	attributes := &syscall.SysProcAttr{}
	probe.join(attributes)
	// No such path can exist: ENOTDIR is the answer of exec, and comes only from a process that is in the leaf.
	_, err := syscall.ForkExec("/proc/self/exe/x", []string{"x"}, &syscall.ProcAttr{Sys: attributes})
	probe.release()
	if err != syscall.ENOTDIR {
		return nil
	}
	return g
}

func (g *groups) leaf() *leaf {
	if g == nil {
		return nil
	}
	g.sweep()
	name := "orchard-" + strconv.FormatUint(g.count.Add(1), 10)
	if err := syscall.Mkdirat(g.folder, name, 0o755); err != nil {
		return nil
	}
	folder, err := syscall.Openat(g.folder, name, openFolder, 0)
	if err != nil {
		g.remove(name)
		return nil
	}
	return &leaf{groups: g, name: name, folder: folder}
}

func (g *groups) remove(name string) error {
	path, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	const removeFolder = 0x200
	_, _, errno := syscall.Syscall(syscall.SYS_UNLINKAT, uintptr(g.folder), uintptr(unsafe.Pointer(path)), removeFolder)
	if errno != 0 {
		return errno
	}
	return nil
}

func (g *groups) sweep() {
	g.mu.Lock()
	defer g.mu.Unlock()
	kept := g.old[:0]
	for _, name := range g.old {
		if g.remove(name) == syscall.EBUSY {
			kept = append(kept, name)
		}
	}
	g.old = kept
}

func (l *leaf) join(attributes *syscall.SysProcAttr) {
	if l != nil {
		attributes.UseCgroupFD = true
		attributes.CgroupFD = l.folder
	}
}

func (l *leaf) kill() {
	if l == nil {
		return
	}
	if fd, err := syscall.Openat(l.folder, "cgroup.kill", syscall.O_WRONLY|syscall.O_CLOEXEC, 0); err == nil {
		syscall.Write(fd, []byte("1"))
		syscall.Close(fd)
	}
}

// release forgets the leaf; one that still holds children is removed later.
func (l *leaf) release() {
	if l == nil {
		return
	}
	syscall.Close(l.folder)
	if l.groups.remove(l.name) != nil {
		l.groups.mu.Lock()
		l.groups.old = append(l.groups.old, l.name)
		l.groups.mu.Unlock()
	}
}
