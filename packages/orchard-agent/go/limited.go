package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
)

const (
	rlimitAs    = 9
	rlimitNproc = 6
	// limitedName is the first argument of a process that sets its limits before it becomes a command.
	limitedName = "orchard-limited"
)

func (e *executor) limited() bool { return e.settings.AddressSpace > 0 || e.settings.Processes > 0 }

// limitedArgv makes of a command one that first limits itself: the agent's own memory can't be limited with that of
// its commands.
func (e *executor) limitedArgv(program string, argv []string) (string, []string) {
	if !e.limited() {
		return program, argv
	}
	s := e.settings
	own := []string{limitedName, "limited", strconv.FormatUint(s.AddressSpace, 10), strconv.FormatUint(s.Processes, 10), program}
	return "/proc/self/exe", append(own, argv...)
}

// limitedCommand is the other side of limitedArgv; it returns only where the command can't be run.
func limitedCommand(args []string) error {
	if len(args) < 4 {
		return errors.New("limited BYTES PROCESSES PROGRAM ARGV...")
	}
	for i, resource := range [2]int{rlimitAs, rlimitNproc} {
		value, err := strconv.ParseUint(args[i], 10, 64)
		if err != nil {
			return err
		}
		if value > 0 {
			if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: value}); err != nil {
				return err
			}
		}
	}
	err := syscall.Exec(args[2], args[3:], os.Environ())
	fmt.Fprintf(os.Stderr, "%s: %s\n", args[3], err)
	if err == syscall.ENOENT || err == syscall.ENOTDIR {
		os.Exit(127)
	}
	os.Exit(126)
	return nil
}
