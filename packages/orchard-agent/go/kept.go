package main

import (
	"crypto/sha256"
	"sync"
	"time"
)

const (
	// keptBytes bounds the output of finished commands that is held for repeated requests.
	keptBytes = 6 << 20
	// rememberedKeys bounds how many keys are known at all.
	rememberedKeys = 16384
	// graceWithoutClient is how long a command with a key lives on after its connection broke, for a client that
	// repeats the request.
	graceWithoutClient = 3 * time.Second
)

// running is one command, from its request until its result is forgotten.
type running struct {
	key         string
	fingerprint [32]byte
	done        chan struct{}
	cancel      chan struct{}
	cancelOnce  sync.Once
	result      *execResult
	err         error

	// Guarded by kept.mu.
	attached  int
	finished  bool
	delivered bool
	forgotten bool
}

func (r *running) stop() { r.cancelOnce.Do(func() { close(r.cancel) }) }

// kept finds the command of a key again: the one that still runs, or the result of the one that has ended.
type kept struct {
	mu    sync.Mutex
	byKey map[string]*running
	order []*running
	bytes int
}

func newKept() *kept { return &kept{byKey: map[string]*running{}} }

func fingerprint(r *execRequest) [32]byte {
	hash := sha256.New()
	part := func(text string) { hash.Write([]byte(text)); hash.Write([]byte{0}) }
	part(r.head.User)
	part(r.cwd)
	for _, list := range [][]string{r.env, {"\x01"}, r.argv} {
		for _, text := range list {
			part(text)
		}
	}
	hash.Write(r.line)
	return [32]byte(hash.Sum(nil))
}

// claim attaches to the command of a key; fresh says that the caller must run it.
func (k *kept) claim(key string, print [32]byte) (command *running, fresh bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key != "" {
		if known, ok := k.byKey[key]; ok {
			switch {
			case known.forgotten:
				return nil, false, refuse(410, "gone", "the result of this key is no longer kept; the command is not run twice")
			case known.fingerprint != print:
				return nil, false, refuse(409, "key_reused", "this key was used for another command")
			}
			known.attached++
			return known, false, nil
		}
	}
	command = &running{key: key, fingerprint: print, done: make(chan struct{}), cancel: make(chan struct{}), attached: 1}
	if key != "" {
		k.add(command)
	}
	return command, true, nil
}

func (k *kept) add(command *running) {
	k.byKey[command.key] = command
	k.order = append(k.order, command)
	for at := 0; len(k.order) > rememberedKeys && at < len(k.order); {
		oldest := k.order[at]
		if !oldest.finished {
			at++
			continue
		}
		k.forget(oldest)
		delete(k.byKey, oldest.key)
		k.order = append(k.order[:at], k.order[at+1:]...)
	}
}

// forget drops a finished command's output.
func (k *kept) forget(command *running) {
	if command.forgotten {
		return
	}
	command.forgotten = true
	if command.result != nil {
		k.bytes -= command.result.size()
		if command.attached == 0 {
			command.result.output = [6][]byte{}
		}
	}
}

// finish publishes a command's result.
func (k *kept) finish(command *running, result *execResult, err error) {
	k.mu.Lock()
	command.result, command.err, command.finished = result, err, true
	if command.key != "" {
		if result != nil {
			k.bytes += result.size()
		}
		k.trim(command)
	}
	k.mu.Unlock()
	close(command.done)
}

// trim forgets delivered results first, then the oldest; never the newest, which may still have to be delivered.
func (k *kept) trim(newest *running) {
	for _, deliveredOnly := range [2]bool{true, false} {
		for _, command := range k.order {
			if k.bytes <= keptBytes {
				return
			}
			if command.finished && !command.forgotten && command.attached == 0 && command != newest &&
				(command.delivered || !deliveredOnly) {
				k.forget(command)
			}
		}
	}
}

// detach ends one request's interest in a command.
func (k *kept) detach(command *running, delivered bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	command.attached--
	command.delivered = command.delivered || delivered
	if command.attached > 0 {
		return
	}
	if command.finished {
		if command.forgotten && command.result != nil {
			command.result.output = [6][]byte{}
		} else if command.key != "" {
			// One result alone may exceed the bound; once delivered it goes first.
			k.trim(nil)
		}
		return
	}
	if command.key == "" {
		command.stop()
		return
	}
	time.AfterFunc(graceWithoutClient, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if command.attached == 0 && !command.finished {
			command.stop()
		}
	})
}

// cancelKey ends the command of a key at once. A key that is not known yet is refused when its request arrives.
func (k *kept) cancelKey(key string) *running {
	k.mu.Lock()
	defer k.mu.Unlock()
	command, ok := k.byKey[key]
	if !ok {
		command = &running{key: key, done: make(chan struct{}), cancel: make(chan struct{}), finished: true, forgotten: true}
		close(command.done)
		k.add(command)
	}
	command.stop()
	return command
}

// drop lets a key be used again: its command was never started.
func (k *kept) drop(command *running) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if command.key == "" || k.byKey[command.key] != command {
		return
	}
	delete(k.byKey, command.key)
	for at := len(k.order) - 1; at >= 0; at-- {
		if k.order[at] == command {
			k.order = append(k.order[:at], k.order[at+1:]...)
			return
		}
	}
}
