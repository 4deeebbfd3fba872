package main

import (
	"slices"
	"testing"
)

func TestClosureFollowsChildrenAndSparesTheAgent(t *testing.T) {
	found := []process{
		{pid: 1, state: 'S'},
		{pid: 10, parent: 1, session: 10, state: 'S'},
		{pid: 11, parent: 10, session: 11, state: 'S'},
		{pid: 12, parent: 11, session: 12, state: 'Z'},
		{pid: 13, parent: 12, session: 12, state: 'R'},
		{pid: 20, parent: 1, session: 20, state: 'S'},
	}
	members := closure(found, 1, func(p *process) bool { return p.session == 10 || p.pid == 1 })
	var pids []int
	for pid := range members {
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	if !slices.Equal(pids, []int{10, 11, 13}) {
		t.Fatalf("got %v", pids)
	}
}

func TestStatOfAProcessWithAnOddName(t *testing.T) {
	one, ok := readStat(1, make([]byte, 4096))
	if !ok || one.pid != 1 || one.parent != 0 {
		t.Fatalf("got %+v, %v", one, ok)
	}
}
