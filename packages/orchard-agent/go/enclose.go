package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"unsafe"
)

// enclosure is what a local sandbox sees: a read-only root folder and what is mounted over it.
type enclosure struct {
	Root     string `json:"root"`
	Hostname string `json:"hostname"`
	UID      int    `json:"uid"`
	GID      int    `json:"gid"`
	Network  bool   `json:"network"`
	ShmBytes int64  `json:"shm_bytes"`
	Workdir  string `json:"workdir"`
	Binds    []bind `json:"binds"`
}

type bind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	Writable bool   `json:"writable"`
}

const (
	capSetpcap     = 8
	capNetAdmin    = 12
	capSysAdmin    = 21
	capSysResource = 24
)

// encloseCommand starts a copy of itself in fresh namespaces and waits for it; the copy ends with it.
func encloseCommand(args []string) error {
	flags := flag.NewFlagSet("enclose", flag.ExitOnError)
	layout := flags.String("layout", "", "JSON of what the sandbox sees")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var e enclosure
	if err := json.Unmarshal([]byte(*layout), &e); err != nil {
		return fmt.Errorf("-layout: %w", err)
	}
	// The death signal is tied to the thread that starts the copy.
	runtime.LockOSThread()
	if err := prctl(prSetPdeathsig, uintptr(syscall.SIGKILL)); err != nil {
		return err
	}
	attributes := &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWCGROUP,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: e.UID, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: e.GID, HostID: os.Getgid(), Size: 1}},
		AmbientCaps: []uintptr{capSetpcap, capNetAdmin, capSysAdmin, capSysResource},
		Pdeathsig:   syscall.SIGKILL,
	}
	if !e.Network {
		attributes.Cloneflags |= syscall.CLONE_NEWNET
	}
	argv := append([]string{"orchard-agent", "enclosed", *layout}, flags.Args()...)
	pid, err := syscall.ForkExec("/proc/self/exe", argv, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: attributes,
	})
	if err != nil {
		return fmt.Errorf("the kernel gives no user namespace: %w", err)
	}
	var status syscall.WaitStatus
	for {
		if _, err = syscall.Wait4(pid, &status, 0, nil); err != syscall.EINTR {
			break
		}
	}
	if status.Exited() {
		os.Exit(status.ExitStatus())
	}
	os.Exit(128 + int(status.Signal()))
	return err
}

// enclosedCommand, in the new namespaces, makes the mounts, gives up all privileges and becomes the program.
func enclosedCommand(args []string) error {
	if len(args) < 2 {
		return errors.New("only enclose calls this")
	}
	var e enclosure
	if err := json.Unmarshal([]byte(args[0]), &e); err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := e.mount(); err != nil {
		return err
	}
	if err := syscall.Sethostname([]byte(e.Hostname)); err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	if !e.Network {
		if err := loopbackUp(); err != nil {
			return fmt.Errorf("loopback: %w", err)
		}
	}
	// No namespaces within: they would open more of the kernel to hostile programs.
	if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
		return fmt.Errorf("forbid nested namespaces: %w", err)
	}
	if err := os.Chdir(e.Workdir); err != nil {
		return err
	}
	if err := dropPrivileges(); err != nil {
		return err
	}
	return syscall.Exec(args[1], args[1:], os.Environ())
}

func (e *enclosure) mount() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := bindMount(e.Root, e.Root, false, false); err != nil {
		return err
	}
	for _, b := range e.Binds {
		if err := bindMount(b.Source, filepath.Join(e.Root, b.Target), b.Writable, true); err != nil {
			return err
		}
	}
	const quiet = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	if err := syscall.Mount("proc", filepath.Join(e.Root, "proc"), "proc", quiet, ""); err != nil {
		return fmt.Errorf("mount a fresh /proc: %w", err)
	}
	if err := e.devices(filepath.Join(e.Root, "dev")); err != nil {
		return err
	}
	if err := os.Chdir(e.Root); err != nil {
		return err
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("detach the old root: %w", err)
	}
	return os.Chdir("/")
}

func (e *enclosure) devices(dev string) error {
	const flags = syscall.MS_NOSUID | syscall.MS_NOEXEC
	if err := syscall.Mount("tmpfs", dev, "tmpfs", flags, "mode=755,size=64k"); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		target := filepath.Join(dev, name)
		if err := os.WriteFile(target, nil, 0o666); err != nil {
			return err
		}
		if err := syscall.Mount("/dev/"+name, target, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("/dev/%s: %w", name, err)
		}
	}
	links := map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
		"ptmx": "pts/ptmx",
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	for _, name := range []string{"pts", "shm"} {
		if err := os.Mkdir(filepath.Join(dev, name), 0o755); err != nil {
			return err
		}
	}
	err := syscall.Mount("devpts", filepath.Join(dev, "pts"), "devpts", flags, "newinstance,ptmxmode=0666,mode=620")
	if err != nil {
		return fmt.Errorf("mount /dev/pts: %w", err)
	}
	options := fmt.Sprintf("mode=1777,size=%d", e.ShmBytes)
	if err := syscall.Mount("tmpfs", filepath.Join(dev, "shm"), "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount /dev/shm: %w", err)
	}
	return syscall.Mount("", dev, "", flags|syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY, "")
}

// mountAttributes is the kernel's struct mount_attr.
type mountAttributes struct{ set, clear, propagation, userNamespace uint64 }

const (
	attributeReadOnly = 1
	attributeNoSuid   = 2
	attributeNoDev    = 4
	atRecursive       = 0x8000
)

// bindMount shows source at target, with all that is mounted below it; read-only then means all of that.
func bindMount(source, target string, writable, recursive bool) error {
	flags := uintptr(syscall.MS_BIND)
	how := uintptr(0)
	if recursive {
		flags |= syscall.MS_REC
		how = atRecursive
	}
	if err := syscall.Mount(source, target, "", flags, ""); err != nil {
		return fmt.Errorf("bind %s: %w", source, err)
	}
	attributes := mountAttributes{set: attributeNoSuid | attributeNoDev}
	if !writable {
		attributes.set |= attributeReadOnly
	}
	path, err := syscall.BytePtrFromString(target)
	if err != nil {
		return err
	}
	const atFdcwd = ^uintptr(99)
	if _, _, errno := syscall.Syscall6(sysMountSetattr, atFdcwd, uintptr(unsafe.Pointer(path)), how,
		uintptr(unsafe.Pointer(&attributes)), unsafe.Sizeof(attributes), 0); errno != 0 {
		return fmt.Errorf("protect the mount of %s (Linux 5.12 or newer is needed): %w", source, errno)
	}
	return nil
}

func loopbackUp() error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	var request struct {
		name  [16]byte
		flags uint16
		rest  [22]byte
	}
	copy(request.name[:], "lo")
	request.flags = syscall.IFF_UP | syscall.IFF_RUNNING
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.SIOCSIFFLAGS,
		uintptr(unsafe.Pointer(&request))); errno != 0 {
		return errno
	}
	return nil
}

// dropPrivileges empties every capability set of the calling thread, which exec then makes the process's.
func dropPrivileges() error {
	const (
		prCapAmbient   = 47
		ambientClear   = 4
		prCapbsetDrop  = 24
		capVersion3    = 0x20080522
		highestAllowed = 63
	)
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, prCapAmbient, ambientClear, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	for capability := uintptr(0); capability <= highestAllowed; capability++ {
		// Refused where CAP_SETPCAP isn't held; without set-user-ID files the bounding set bounds nothing.
		if prctl(prCapbsetDrop, capability) != nil {
			break
		}
	}
	header := struct {
		version uint32
		pid     int32
	}{version: capVersion3}
	var sets [6]uint32
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)),
		uintptr(unsafe.Pointer(&sets)), 0); errno != 0 {
		return errno
	}
	if err := prctl(prSetNoNewPrivs, 1); err != nil {
		return err
	}
	return prctl(prSetPdeathsig, uintptr(syscall.SIGKILL))
}
