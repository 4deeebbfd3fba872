package main

import (
	"bytes"
	"math/rand"
	"testing"
)

func TestCaptureKeepsHeadAndTail(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	for round := 0; round < 2000; round++ {
		limit := random.Intn(40)
		var whole []byte
		kept := newCapture(limit)
		for writes := random.Intn(8); writes > 0; writes-- {
			part := make([]byte, random.Intn(30))
			random.Read(part)
			whole = append(whole, part...)
			kept.write(part)
		}
		want := whole
		if len(whole) > limit {
			want = append(append([]byte{}, whole[:(limit+1)/2]...), whole[len(whole)-limit/2:]...)
		}
		parts := kept.parts()
		got := bytes.Join(parts[:], nil)
		if !bytes.Equal(got, want) || kept.dropped() != int64(len(whole)-len(want)) {
			t.Fatalf("limit %d: got %v, dropped %d; want %v of %v", limit, got, kept.dropped(), want, whole)
		}
		if cap(kept.tail) > kept.tailLimit {
			t.Fatalf("a tail of %d bytes for a limit of %d", cap(kept.tail), kept.tailLimit)
		}
	}
}
