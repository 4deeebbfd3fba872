package main

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// reaper waits for every child: commands, whose status their exec gets, and orphans that the kernel hands to us.
type reaper struct {
	mu      sync.Mutex
	waiting map[int]chan syscall.WaitStatus
	// early holds statuses of children that ended before their exec asked.
	early map[int]earlyStatus
}

type earlyStatus struct {
	status syscall.WaitStatus
	at     time.Time
}

const earlyKept = 4096

func newReaper() *reaper {
	return &reaper{waiting: map[int]chan syscall.WaitStatus{}, early: map[int]earlyStatus{}}
}

func (r *reaper) run() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	r.collect()
	for range ended {
		r.collect()
	}
}

func (r *reaper) collect() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		r.mu.Lock()
		if waiter, ok := r.waiting[pid]; ok {
			delete(r.waiting, pid)
			waiter <- status
		} else {
			if len(r.early) >= earlyKept {
				r.forget()
			}
			r.early[pid] = earlyStatus{status, time.Now()}
		}
		r.mu.Unlock()
	}
}

// forget drops statuses that no exec can still ask for.
func (r *reaper) forget() {
	cutoff := time.Now().Add(-10 * time.Second)
	for pid, entry := range r.early {
		if entry.at.Before(cutoff) {
			delete(r.early, pid)
		}
	}
	if len(r.early) >= earlyKept {
		clear(r.early)
	}
}

// exit returns the channel on which the status of pid, started no earlier than since, arrives.
func (r *reaper) exit(pid int, since time.Time) <-chan syscall.WaitStatus {
	waiter := make(chan syscall.WaitStatus, 1)
	r.mu.Lock()
	defer r.mu.Unlock()
	entry, ok := r.early[pid]
	delete(r.early, pid)
	if ok && !entry.at.Before(since) {
		waiter <- entry.status
		return waiter
	}
	r.waiting[pid] = waiter
	return waiter
}
