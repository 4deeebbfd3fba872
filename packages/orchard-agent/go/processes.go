package main

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"
)

// process is one line of a scan of /proc.
type process struct {
	pid, parent, group, session int
	state                       byte
	// started is in clock ticks since the machine's boot.
	started uint64
	marked  bool
	// blank says that its environment could not be seen: it has none, or is just replacing its program.
	blank bool
}

func (p *process) alive() bool { return p.state != 'Z' && p.state != 'X' }

// scan lists all visible processes; marked are those whose environment holds marker (when one is given).
func scan(marker []byte) ([]process, error) {
	folder, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	names, err := folder.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	found := make([]process, 0, len(names))
	buffer := make([]byte, 4096)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		one, ok := readStat(pid, buffer)
		if !ok {
			continue
		}
		if len(marker) > 0 && one.alive() {
			environment, err := os.ReadFile("/proc/" + name + "/environ")
			one.marked = bytes.Contains(environment, marker)
			one.blank = err == nil && len(environment) == 0
		}
		found = append(found, one)
	}
	return found, nil
}

func readStat(pid int, buffer []byte) (process, bool) {
	fd, err := syscall.Open("/proc/"+strconv.Itoa(pid)+"/stat", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return process{}, false
	}
	n, err := syscall.Read(fd, buffer)
	syscall.Close(fd)
	if err != nil {
		return process{}, false
	}
	// The name in parentheses may itself hold spaces and parentheses.
	end := bytes.LastIndexByte(buffer[:n], ')')
	if end < 0 {
		return process{}, false
	}
	fields := bytes.Fields(buffer[end+1 : n])
	if len(fields) < 20 {
		return process{}, false
	}
	number := func(i int) int { value, _ := strconv.Atoi(string(fields[i])); return value }
	started, _ := strconv.ParseUint(string(fields[19]), 10, 64)
	return process{
		pid: pid, state: fields[0][0], parent: number(1), group: number(2), session: number(3), started: started,
	}, true
}

// blankPatience is how long a process that replaces its program is waited for. One without any environment looks the
// same for good.
const blankPatience = 100 * time.Millisecond

// killUntilStable kills what belongs picks, and all descendants of those, until two scans in a row find none alive and
// none, of those started since, that can't be told yet. It returns how many were killed, and how many were still there
// at the deadline.
func killUntilStable(
	marker []byte, since uint64, deadline time.Time, belongs func(*process) bool,
) (killed, left int) {
	self := os.Getpid()
	// By pid, with the start time: one that is dying has lost its environment and its parent.
	seen := map[int]uint64{}
	quiet := 0
	patience := time.Now().Add(blankPatience)
	pause := 200 * time.Microsecond
	for {
		found, err := scan(marker)
		if err != nil {
			return killed, -1
		}
		members := closure(found, self, func(p *process) bool {
			started, known := seen[p.pid]
			return known && started == p.started || belongs(p)
		})
		left = 0
		for pid, started := range members {
			if err := syscall.Kill(pid, syscall.SIGKILL); err == syscall.ESRCH {
				continue
			}
			left++
			if before, known := seen[pid]; !known || before != started {
				seen[pid] = started
				killed++
			}
		}
		if left == 0 && (!anyBlank(found, since) || time.Now().After(patience)) {
			if quiet++; quiet == 2 {
				return killed, 0
			}
			time.Sleep(200 * time.Microsecond)
			continue
		}
		quiet = 0
		if time.Now().After(deadline) {
			return killed, left
		}
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

func anyBlank(found []process, since uint64) bool {
	for i := range found {
		if found[i].blank && found[i].started >= since {
			return true
		}
	}
	return false
}

// closure returns the living processes that belong and their descendants, never self, with their start times.
func closure(found []process, self int, belongs func(*process) bool) map[int]uint64 {
	children := map[int][]*process{}
	var queue []*process
	for i := range found {
		one := &found[i]
		children[one.parent] = append(children[one.parent], one)
		if one.pid != self && belongs(one) {
			queue = append(queue, one)
		}
	}
	visited := map[int]bool{}
	members := map[int]uint64{}
	for len(queue) > 0 {
		one := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		if visited[one.pid] || one.pid == self {
			continue
		}
		visited[one.pid] = true
		if one.alive() {
			members[one.pid] = one.started
		}
		queue = append(queue, children[one.pid]...)
	}
	return members
}

// quiesce kills every process of the sandbox but the agent.
func quiesce(ownsNamespace bool, timeout time.Duration) (killed, left int) {
	self := os.Getpid()
	all := ownsNamespace || self == 1
	return killUntilStable(nil, 0, time.Now().Add(timeout), func(p *process) bool {
		if all {
			// PID 1 may be the init of a container, and its end is the end of the container.
			return p.pid != 1
		}
		return p.parent == self
	})
}
