package main

import (
	"sync"
	"time"
)

// life ends the sandbox when no client has given a sign of life for the TTL.
type life struct {
	mu       sync.Mutex
	ttl      time.Duration
	lastSeen time.Time
	active   int
	once     sync.Once
	finish   func(code int)
}

func newLife(ttl time.Duration, finish func(code int)) *life {
	return &life{ttl: ttl, lastSeen: time.Now(), finish: finish}
}

// busy marks a request's begin; the returned function its end. A request in progress is a sign of life.
func (l *life) busy() func() {
	l.mu.Lock()
	l.active++
	l.mu.Unlock()
	return func() {
		l.mu.Lock()
		l.active--
		l.lastSeen = time.Now()
		l.mu.Unlock()
	}
}

func (l *life) renew(ttl time.Duration) {
	l.mu.Lock()
	l.ttl, l.lastSeen = ttl, time.Now()
	l.mu.Unlock()
}

// left is the time until the end if nobody calls any more; negative where there is no TTL.
func (l *life) left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ttl <= 0 {
		return -1
	}
	if l.active > 0 {
		return l.ttl
	}
	return max(0, l.ttl-time.Since(l.lastSeen))
}

// expired is the exit code when the TTL ran out.
const expired = 75

func (l *life) end(code int) { l.once.Do(func() { l.finish(code) }) }

func (l *life) watch() {
	for {
		left := l.left()
		if left == 0 {
			l.end(expired)
			return
		}
		if left < 0 || left > 5*time.Second {
			// A renewal may shorten the TTL.
			left = 5 * time.Second
		}
		time.Sleep(max(left, 10*time.Millisecond))
	}
}
