package main

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// removeTree removes a folder made to resist it too: without rights, or nested deeper than descriptors last.
func removeTree(path string) error {
	if os.RemoveAll(path) == nil {
		return nil
	}
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer root.Close()
	name := filepath.Base(path)
	info, err := root.Lstat(name)
	if err != nil || !info.IsDir() {
		return os.RemoveAll(path)
	}
	if err := root.Chmod(name, 0o700); err != nil {
		return err
	}
	top, err := root.OpenRoot(name)
	if err != nil {
		return err
	}
	defer top.Close()
	if err := flatten(top); err != nil {
		return err
	}
	return root.Remove(name)
}

// flatten empties a folder without ever going deeper than one level: folders move up to it and wait their turn.
func flatten(top *os.Root) error {
	queue := []string{"."}
	for moved := 0; len(queue) > 0; {
		folder := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		names, err := readNames(top, folder)
		if err != nil {
			return err
		}
		for _, name := range names {
			child := filepath.Join(folder, name)
			info, err := top.Lstat(child)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			if err = top.Remove(child); err == nil {
				continue
			}
			if !info.IsDir() {
				return err
			}
			if err := top.Chmod(child, 0o700); err != nil {
				return err
			}
			place := child
			if folder != "." {
				moved++
				place = ".orchard-removed-" + strconv.Itoa(moved)
				if err := top.Rename(child, place); err != nil {
					return err
				}
			}
			queue = append(queue, place)
		}
		if folder != "." {
			if err := top.Remove(folder); err != nil {
				return err
			}
		}
	}
	return nil
}

func readNames(top *os.Root, folder string) ([]string, error) {
	file, err := top.Open(folder)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return file.Readdirnames(-1)
}

// readOwner reads a sandbox folder's file of that name: the tag of the client that made it, and its control groups.
func readOwner(folder string) (tag, groups string) {
	text, _ := os.ReadFile(filepath.Join(folder, "owner"))
	tag, groups, _ = strings.Cut(string(text), "\n")
	return tag, groups
}

// removeGroup removes the control groups that a sandbox's folder names, with their leaves.
func removeGroup(folder string) error {
	_, groups := readOwner(folder)
	var failed error
	for _, group := range strings.Fields(groups) {
		os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0)
		entries, err := os.ReadDir(group)
		if err != nil {
			continue
		}
		for _, entry := range entries {
			if entry.IsDir() {
				os.Remove(filepath.Join(group, entry.Name()))
			}
		}
		if err := os.Remove(group); err != nil {
			failed = err
		}
	}
	return failed
}

// settleTime is how long launchers are looked for after their client's end: one may still be on its way.
const settleTime = time.Second

// killLaunchers kills the launchers that show one of these folders. One that was being set up when its client was killed
// may wait for ever: bubblewrap arranges to die with its parent only later.
func killLaunchers(folders []string, owner string) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		line, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline"))
		if err != nil {
			continue
		}
		program, _, _ := bytes.Cut(line, []byte{0})
		switch filepath.Base(string(program)) {
		case "setpriv", "bwrap", "orchard-agent":
		default:
			continue
		}
		for _, folder := range folders {
			shown := bytes.Contains(line, []byte("\x00"+folder+"/")) || bytes.Contains(line, []byte("\""+folder+"/"))
			if shown && stillOwned(folder, owner) {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
}

// stillOwned tells whether a folder's name is still its owner's or nobody's. Another client may have taken the name
// again; a folder without an owner is one that is being removed, for folders appear complete.
func stillOwned(folder, owner string) bool {
	tag, _ := readOwner(folder)
	return tag == owner || tag == ""
}

// janitorCommand waits for its client's end and removes the folders of the sandboxes that it owned.
func janitorCommand(args []string) error {
	flags := flag.NewFlagSet("janitor", flag.ExitOnError)
	base := flags.String("base", "", "folder of the sandboxes")
	owner := flags.String("owner", "", "the client's tag, found in the file `owner` of each of its sandboxes")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *base == "" || *owner == "" {
		return errors.New("-base and -owner are needed")
	}
	signal.Ignore()
	io.Copy(io.Discard, os.Stdin)
	var owned []string
	entries, err := os.ReadDir(*base)
	if err != nil {
		return nil
	}
	for _, entry := range entries {
		folder := filepath.Join(*base, entry.Name())
		if tag, _ := readOwner(folder); tag == *owner || strings.HasPrefix(entry.Name(), ".new-"+*owner+"-") {
			owned = append(owned, folder)
		}
	}
	ended := time.Now()
	for left := owned; len(owned) > 0; time.Sleep(50 * time.Millisecond) {
		killLaunchers(owned, *owner)
		var still []string
		for _, folder := range left {
			// Processes of the sandbox may live a moment longer and write while it is removed.
			if stillOwned(folder, *owner) && (removeGroup(folder) != nil || removeTree(folder) != nil) {
				still = append(still, folder)
			}
		}
		left = still
		if since := time.Since(ended); (len(left) == 0 && since > settleTime) || since > 20*time.Second {
			return nil
		}
	}
	return nil
}
