package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// query are a request's parameters, decoded to exact bytes.
type query struct {
	values  url.Values
	workdir string
}

func (s *server) query(r *http.Request) (*query, error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, refuse(400, "bad_request", "the query can't be decoded: "+err.Error())
	}
	return &query{values, s.settings.Workdir}, nil
}

// pathQuery reads a request's parameters and the path that it is about.
func (s *server) pathQuery(r *http.Request) (*query, string, error) {
	q, err := s.query(r)
	if err != nil {
		return q, "", err
	}
	path, err := q.path()
	return q, path, err
}

// path is the parameter of that name; a relative one starts at the working directory.
func (q *query) path() (string, error) {
	text := q.values.Get("path")
	if text == "" {
		return "", refuse(400, "bad_request", "path is missing")
	}
	if strings.IndexByte(text, 0) >= 0 {
		return "", refuse(400, "bad_request", "a path can't hold a NUL byte")
	}
	if !filepath.IsAbs(text) {
		text = q.workdir + "/" + text
	}
	return text, nil
}

func (q *query) number(name string, fallback int64, base int) (int64, error) {
	text := q.values.Get(name)
	if text == "" {
		return fallback, nil
	}
	value, err := strconv.ParseInt(text, base, 64)
	if err != nil || value < 0 {
		return 0, refuse(400, "bad_request", fmt.Sprintf("%s must be a number of at least 0", name))
	}
	return value, nil
}

func (q *query) flag(name string) bool { return q.values.Get(name) == "1" }

// mode is the parameter of that name in octal, or -1.
func (q *query) mode(name string) (int64, error) {
	if q.values.Get(name) == "" {
		return -1, nil
	}
	value, err := q.number(name, -1, 8)
	if err == nil && value > 0o7777 {
		err = refuse(400, "bad_request", name+" must be at most 7777, octal")
	}
	return value, err
}

// owner is the uid and gid that files are given: the parameter's, else that of the sandbox's own user, else -1.
func (s *server) owner(q *query) (uid, gid int, err error) {
	user := q.values.Get("owner")
	if user == "" {
		user = s.settings.User
	}
	if user == "" {
		return -1, -1, nil
	}
	account, err := s.executor.account(user)
	if err != nil || account.credential == nil {
		return -1, -1, err
	}
	return int(account.credential.Uid), int(account.credential.Gid), nil
}

// fileMode turns permission bits, setuid and sticky included, into Go's.
func fileMode(bits int64) fs.FileMode {
	mode := fs.FileMode(bits & 0o777)
	for bit, flag := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if bits&bit != 0 {
			mode |= flag
		}
	}
	return mode
}

// makeParents makes the folders above path, owned like the file will be.
func makeParents(path string, uid, gid int) error {
	var missing []string
	for folder := filepath.Dir(path); ; folder = filepath.Dir(folder) {
		if _, err := os.Stat(folder); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) || folder == filepath.Dir(folder) {
			return err
		}
		missing = append(missing, folder)
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := os.Mkdir(missing[i], 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if uid >= 0 {
			if err := os.Lchown(missing[i], uid, gid); err != nil {
				return err
			}
		}
	}
	return nil
}

// describe is one row of a listing: name, kind, size, permission bits, seconds, uid, gid, link target.
func describe(name string, info fs.FileInfo, target *string) []any {
	kind := "device"
	switch mode := info.Mode(); {
	case mode.IsRegular():
		kind = "file"
	case mode.IsDir():
		kind = "directory"
	case mode&fs.ModeSymlink != 0:
		kind = "symlink"
	case mode&fs.ModeNamedPipe != 0:
		kind = "fifo"
	case mode&fs.ModeSocket != 0:
		kind = "socket"
	}
	row := []any{quote(name), kind, info.Size(), 0, float64(info.ModTime().UnixNano()) / 1e9, 0, 0, nil}
	if raw, ok := info.Sys().(*syscall.Stat_t); ok {
		row[3], row[5], row[6] = raw.Mode&0o7777, raw.Uid, raw.Gid
	}
	if target != nil {
		row[7] = quote(*target)
	}
	return row
}

func describePath(path, name string, follow bool) ([]any, error) {
	look := os.Lstat
	if follow {
		look = os.Stat
	}
	info, err := look(path)
	if err != nil {
		return nil, err
	}
	var target *string
	if info.Mode()&fs.ModeSymlink != 0 {
		if text, err := os.Readlink(path); err == nil {
			target = &text
		}
	}
	return describe(name, info, target), nil
}
