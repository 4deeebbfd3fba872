package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// groups makes a cgroup v2 leaf for each command where the agent can write its own group. A nil *groups makes none.
type groups struct {
	folder string
	count  atomic.Uint64
	mu     sync.Mutex
	// old are leaves of commands that ended while children of theirs lived on.
	old []string
}

// leaf is one command's cgroup; a nil *leaf is none.
type leaf struct {
	groups *groups
	folder *os.File
}

// findGroups looks for the agent's own cgroup and tries to make a leaf in it.
func findGroups() *groups {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	for _, line := range strings.Split(string(text), "\n") {
		path, found := strings.CutPrefix(line, "0::")
		if !found {
			continue
		}
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
			folder := filepath.Join(root, path)
			if _, err := os.Stat(filepath.Join(folder, "cgroup.kill")); err != nil {
				// The root group of a machine has no cgroup.kill, and commands don't belong there.
				continue
			}
			g := &groups{folder: folder}
			probe := g.leaf()
			if probe == nil {
				continue
			}
			probe.release()
			return g
		}
	}
	return nil
}

func (g *groups) leaf() *leaf {
	if g == nil {
		return nil
	}
	g.sweep()
	path := filepath.Join(g.folder, "orchard-"+strconv.Itoa(os.Getpid())+"-"+strconv.FormatUint(g.count.Add(1), 10))
	if err := os.Mkdir(path, 0o755); err != nil {
		return nil
	}
	folder, err := os.Open(path)
	if err != nil {
		os.Remove(path)
		return nil
	}
	return &leaf{groups: g, folder: folder}
}

func (g *groups) sweep() {
	g.mu.Lock()
	defer g.mu.Unlock()
	kept := g.old[:0]
	for _, path := range g.old {
		if err := os.Remove(path); err == syscall.EBUSY || os.IsExist(err) {
			kept = append(kept, path)
		} else if pathError, ok := err.(*os.PathError); ok && pathError.Err == syscall.EBUSY {
			kept = append(kept, path)
		}
	}
	g.old = kept
}

func (l *leaf) join(attributes *syscall.SysProcAttr) {
	if l != nil {
		attributes.UseCgroupFD = true
		attributes.CgroupFD = int(l.folder.Fd())
	}
}

func (l *leaf) kill() {
	if l != nil {
		os.WriteFile(filepath.Join(l.folder.Name(), "cgroup.kill"), []byte("1"), 0)
	}
}

// release forgets the leaf; one that still holds children is removed later.
func (l *leaf) release() {
	if l == nil {
		return
	}
	l.folder.Close()
	if os.Remove(l.folder.Name()) != nil {
		l.groups.mu.Lock()
		l.groups.old = append(l.groups.old, l.folder.Name())
		l.groups.mu.Unlock()
	}
}
