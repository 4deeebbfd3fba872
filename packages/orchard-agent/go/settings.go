package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"
)

const tokenVariable = "ORCHARD_AGENT_TOKEN"

// settings are what an agent is started with: one JSON object, a line of the settings stream or a file.
type settings struct {
	Token    string            `json:"token"`
	Workdir  string            `json:"workdir"`
	Env      map[string]string `json:"env"`
	User     string            `json:"user"`
	TTL      float64           `json:"ttl_s"`
	MaxExecs int               `json:"max_execs"`
	// IgnoreTerm keeps processes inside from ending the agent with SIGTERM; the launcher uses SIGKILL from outside.
	IgnoreTerm bool `json:"ignore_term"`
	// OwnsNamespace says that every process the agent can see belongs to the sandbox. Always so for PID 1.
	OwnsNamespace bool   `json:"owns_namespace"`
	FileSizeBytes uint64 `json:"file_size_bytes"`
	OpenFiles     uint64 `json:"open_files"`
	// GroupFd is the folder of a cgroup v2 that the agent may write and will be in; 0: none was handed down.
	GroupFd int `json:"group_fd"`
	// AddressSpace and Processes are rlimits of every command, where there is no control group for them; 0: none.
	AddressSpace uint64 `json:"address_space_bytes"`
	Processes    uint64 `json:"processes"`
	// Programs are what may run inside; null: everything.
	Programs []allowedProgram `json:"programs"`

	listen    string
	lifeline  *os.File
	tokenHash [32]byte
}

func (s *settings) ttl() time.Duration { return time.Duration(s.TTL * float64(time.Second)) }

func parseSettings(args []string) (*settings, error) {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	listen := flags.String("listen", "stdio", "tcp:HOST:PORT, unix:PATH, fd:N or stdio")
	settingsFd := flags.Int("settings-fd", -1, "descriptor to read settings from; the agent exits when it closes")
	settingsFile := flags.String("settings", "", "file to read settings from")
	tokenFile := flags.String("token-file", "", "file that holds the bearer token")
	workdir := flags.String("workdir", "", "working directory of commands")
	ttl := flags.Float64("ttl", 0, "seconds without a client's sign of life after which the agent exits; 0: never")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	s := &settings{MaxExecs: 256, TTL: *ttl, Workdir: *workdir}
	s.Token = os.Getenv(tokenVariable)
	if err := os.Unsetenv(tokenVariable); err != nil {
		return nil, err
	}
	if *settingsFile != "" {
		text, err := os.ReadFile(*settingsFile)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(text, s); err != nil {
			return nil, fmt.Errorf("settings file: %w", err)
		}
	}
	if *settingsFd >= 0 {
		if err := s.readStream(*settingsFd); err != nil {
			return nil, err
		}
	}
	if *tokenFile != "" {
		text, err := os.ReadFile(*tokenFile)
		if err != nil {
			return nil, err
		}
		s.Token = strings.TrimSpace(string(text))
	}
	if len(s.Token) < 16 {
		return nil, fmt.Errorf("a bearer token of at least 16 characters is needed: settings, -token-file or $%s", tokenVariable)
	}
	s.tokenHash = sha256.Sum256([]byte(s.Token))
	s.Token = ""
	s.listen = *listen
	if s.Workdir == "" {
		s.Workdir = "/"
		if here, err := os.Getwd(); err == nil {
			s.Workdir = here
		}
	}
	return s, nil
}

// readStream reads one line of JSON and keeps the descriptor as lifeline: its end is the launcher's end.
func (s *settings) readStream(fd int) error {
	syscall.CloseOnExec(fd)
	s.lifeline = os.NewFile(uintptr(fd), "settings")
	line, err := bufio.NewReaderSize(io.LimitReader(s.lifeline, 4<<20), 4096).ReadBytes('\n')
	if err != nil {
		return errors.Join(errors.New("the launcher left before the settings were read"), err)
	}
	if err := json.Unmarshal(line, s); err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	return nil
}

// announce tells the launcher that requests are served.
func (s *settings) announce() {
	if s.lifeline != nil {
		s.lifeline.Write([]byte("ready\n"))
	}
}

// watchLifeline calls gone once the launcher's end of the settings stream is closed.
func (s *settings) watchLifeline(gone func()) {
	if s.lifeline == nil {
		return
	}
	go func() {
		buffer := make([]byte, 64)
		for {
			if _, err := s.lifeline.Read(buffer); err != nil {
				gone()
				return
			}
		}
	}()
}
