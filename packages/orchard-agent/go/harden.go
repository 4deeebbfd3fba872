package main

import (
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

const (
	prSetDumpable       = 4
	prSetPdeathsig      = 1
	prSetChildSubreaper = 36
	prSetNoNewPrivs     = 38
	rlimitNofile        = 7
	rlimitFsize         = 1
	rlimitCore          = 4
	// collectAtPercent trades a little time for memory that stays near what is held.
	collectAtPercent = 50
)

func prctl(option, argument uintptr) error {
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, option, argument, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// harden keeps processes of the same user from reading the agent's memory, environment and descriptors, makes it the
// reaper of what its commands leave behind, and keeps signals from inside from ending it.
func harden(s *settings, terminate func()) error {
	if err := prctl(prSetDumpable, 0); err != nil {
		return err
	}
	if os.Getpid() != 1 {
		if err := prctl(prSetChildSubreaper, 1); err != nil {
			return err
		}
	}
	debug.SetGCPercent(collectAtPercent)
	limit := func(resource int, value uint64) error {
		return syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: value})
	}
	if err := limit(rlimitCore, 0); err != nil {
		return err
	}
	if s.FileSizeBytes > 0 {
		if err := limit(rlimitFsize, s.FileSizeBytes); err != nil {
			return err
		}
	}
	if s.OpenFiles > 0 {
		if err := limit(rlimitNofile, s.OpenFiles); err != nil {
			return err
		}
	}
	signals := make(chan os.Signal, 16)
	// All of them, those that only the kernel sends too: a process inside could send them by hand.
	signal.Notify(signals)
	go func() {
		for received := range signals {
			if (received == syscall.SIGTERM || received == syscall.SIGINT) && !s.IgnoreTerm {
				terminate()
			}
		}
	}()
	return nil
}
