package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// account is whom a command runs as; the zero account is the agent's own.
type account struct {
	name, home string
	credential *syscall.Credential
}

func (a *account) env() []string {
	if a.name == "" {
		return nil
	}
	return []string{"HOME=" + a.home, "USER=" + a.name, "LOGNAME=" + a.name}
}

// account resolves a user name or uid, `user` or `user:group` as in `docker run --user`.
func (e *executor) account(user string) (*account, error) {
	if user == "" {
		user = e.settings.User
	}
	if user == "" {
		return &account{}, nil
	}
	found, err := findAccount(user)
	if err != nil {
		return nil, err
	}
	if own := uint32(os.Getuid()); own == found.credential.Uid {
		found.credential = nil
	} else if own != 0 {
		return nil, refuse(403, "not_privileged", fmt.Sprintf(
			"the agent runs as uid %d and can't run a command as %q: only an agent that is root can switch users", own, user))
	}
	return found, nil
}

func findAccount(user string) (*account, error) {
	name, group, withGroup := strings.Cut(user, ":")
	found := &account{name: name, home: "/", credential: &syscall.Credential{}}
	fields, known := lookUpDatabase("/etc/passwd", name, 7)
	if known {
		uid, _ := strconv.ParseUint(fields[2], 10, 32)
		gid, _ := strconv.ParseUint(fields[3], 10, 32)
		found.name, found.home = fields[0], fields[5]
		found.credential.Uid, found.credential.Gid = uint32(uid), uint32(gid)
	} else {
		uid, err := strconv.ParseUint(name, 10, 31)
		if err != nil {
			return nil, refuse(422, "unknown_user", fmt.Sprintf("there is no user %q in this sandbox's /etc/passwd", name))
		}
		found.credential.Uid, found.credential.Gid = uint32(uid), uint32(uid)
	}
	if withGroup {
		fields, known := lookUpDatabase("/etc/group", group, 4)
		text := group
		if known {
			text = fields[2]
		}
		gid, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return nil, refuse(422, "unknown_user", fmt.Sprintf("there is no group %q in this sandbox's /etc/group", group))
		}
		found.credential.Gid = uint32(gid)
	}
	return found, nil
}

// lookUpDatabase finds a line of /etc/passwd or /etc/group by name, else by number.
func lookUpDatabase(path, key string, width int) ([]string, bool) {
	file, err := os.Open(path)
	if err != nil {
		return nil, false
	}
	defer file.Close()
	var byNumber []string
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < width {
			continue
		}
		if fields[0] == key {
			return fields, true
		}
		if fields[2] == key && byNumber == nil {
			byNumber = fields
		}
	}
	return byNumber, byNumber != nil
}
