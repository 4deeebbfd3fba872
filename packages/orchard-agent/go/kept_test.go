package main

import (
	"testing"
	"time"
)

func finished(t *testing.T, k *kept, key string, size int) {
	t.Helper()
	command, fresh, err := k.claim(key, [32]byte{})
	if err != nil || !fresh {
		t.Fatalf("claim %s: fresh %v, %v", key, fresh, err)
	}
	k.finish(command, &execResult{Stdout: size, output: [6][]byte{make([]byte, size)}}, nil)
	k.detach(command, true)
}

func TestKeptResultsAreBounded(t *testing.T) {
	k := newKept()
	for _, key := range []string{"a", "b", "c", "d"} {
		finished(t, k, key, keptBytes/2)
	}
	if k.bytes > keptBytes {
		t.Fatalf("%d bytes kept", k.bytes)
	}
	if _, _, err := k.claim("a", [32]byte{}); err == nil {
		t.Fatal("a forgotten key was accepted")
	}
	command, fresh, err := k.claim("d", [32]byte{})
	if err != nil || fresh || command.result == nil {
		t.Fatal("the newest result is lost")
	}
	if _, _, err := k.claim("d", [32]byte{1}); err == nil {
		t.Fatal("a key was accepted for another command")
	}
}

func TestOneHugeResultIsNotKeptOnceDelivered(t *testing.T) {
	k := newKept()
	finished(t, k, "huge", 2*keptBytes)
	if k.bytes != 0 {
		t.Fatalf("%d bytes kept", k.bytes)
	}
}

func TestACommandWithoutAKeyEndsWithItsClient(t *testing.T) {
	k := newKept()
	command, _, _ := k.claim("", [32]byte{})
	k.detach(command, false)
	select {
	case <-command.cancel:
	case <-time.After(time.Second):
		t.Fatal("it lives on")
	}
}

func TestACancelledKeyIsRefusedWhenItArrivesLate(t *testing.T) {
	k := newKept()
	k.cancelKey("late")
	if _, _, err := k.claim("late", [32]byte{}); err == nil {
		t.Fatal("a cancelled command was accepted")
	}
}
