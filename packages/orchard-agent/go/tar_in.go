package main

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"strings"
	"syscall"
	"time"
)

func (s *server) tarIn(w http.ResponseWriter, r *http.Request) error {
	q, err := s.query(r)
	if err != nil {
		return err
	}
	target, err := q.path()
	if err != nil {
		return err
	}
	uid, gid, err := s.owner(q)
	if err != nil {
		return err
	}
	if err := makeParents(target+"/.", uid, gid); err != nil {
		return err
	}
	root, err := os.OpenRoot(target)
	if err != nil {
		return err
	}
	defer root.Close()
	unpacker := &unpacker{root: root, uid: uid, gid: gid, buffer: make([]byte, copyBytes)}
	if err := unpacker.run(r.Body); err != nil {
		return err
	}
	answerJSON(w, &unpacker.report)
	return nil
}

// unpacker extracts a tar into a folder that it can't leave: every path is walked from the folder's descriptor, and a
// link that leads out of it is not followed.
type unpacker struct {
	root     *os.Root
	uid, gid int
	buffer   []byte
	report   tarReport
	folders  []folderMeta
}

type folderMeta struct {
	name    string
	mode    fs.FileMode
	changed time.Time
}

func (u *unpacker) run(body io.Reader) error {
	archive := tar.NewReader(body)
	for {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return refuse(400, "bad_archive", "the tar is broken or cut: "+err.Error())
		}
		if err := u.member(header, archive); err != nil {
			return err
		}
	}
	// Rights and times of folders come last: a read-only one must first be filled.
	for i := len(u.folders) - 1; i >= 0; i-- {
		meta := u.folders[i]
		u.root.Chmod(meta.name, meta.mode)
		u.root.Chtimes(meta.name, meta.changed, meta.changed)
	}
	io.Copy(io.Discard, io.LimitReader(body, 1<<20))
	return nil
}

// member extracts one; an error ends the extraction (no space, a cut archive), what is unsafe is skipped and listed.
func (u *unpacker) member(header *tar.Header, content io.Reader) error {
	name, reason := safeName(header.Name)
	if reason == "" {
		var err error
		if reason, err = u.extract(name, header, content); err != nil {
			return err
		}
	}
	if reason != "" {
		u.report.skip(header.Name, reason)
		return nil
	}
	u.report.Delivered++
	return nil
}

// safeName is a member's name below the target, or why it has none.
func safeName(raw string) (name, reason string) {
	switch {
	case raw == "":
		return "", "it has no name"
	case strings.HasPrefix(raw, "/"):
		return "", "its path is absolute"
	}
	for _, part := range strings.Split(raw, "/") {
		if part == ".." {
			return "", "its path leads out of the folder"
		}
	}
	return path.Clean(raw), ""
}

func (u *unpacker) extract(name string, header *tar.Header, content io.Reader) (reason string, err error) {
	mode := fs.FileMode(header.Mode & 0o777)
	switch header.Typeflag {
	case tar.TypeDir:
		if info, statErr := u.root.Lstat(name); statErr == nil && !info.IsDir() {
			u.root.Remove(name)
		}
		if err := u.root.MkdirAll(name, 0o700|mode); err != nil {
			return tolerate(err)
		}
		u.chown(name)
		u.folders = append(u.folders, folderMeta{name, mode, header.ModTime})
		return "", nil
	case tar.TypeReg:
		return u.file(name, mode, header.ModTime, content)
	case tar.TypeSymlink:
		if err := u.clear(name); err != nil {
			return tolerate(err)
		}
		if err := u.root.Symlink(header.Linkname, name); err != nil {
			return tolerate(err)
		}
		u.chown(name)
		return "", nil
	case tar.TypeLink:
		old, reason := safeName(header.Linkname)
		if reason != "" {
			return "a hard link: " + reason, nil
		}
		if old == name {
			return "a hard link to itself", nil
		}
		if err := u.clear(name); err != nil {
			return tolerate(err)
		}
		if err := u.root.Link(old, name); err != nil {
			return tolerate(err)
		}
		return "", nil
	case tar.TypeXGlobalHeader:
		return "a global header", nil
	}
	return "not a file, folder or link", nil
}

// clear makes the folders above name and removes a file or link that is in the way.
func (u *unpacker) clear(name string) error {
	if parent := path.Dir(name); parent != "." {
		if _, err := u.root.Stat(parent); err != nil {
			if err := u.root.MkdirAll(parent, 0o755); err != nil {
				return err
			}
			u.chown(parent)
		}
	}
	err := u.root.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (u *unpacker) file(name string, mode fs.FileMode, changed time.Time, content io.Reader) (reason string, err error) {
	flags := os.O_WRONLY | os.O_CREATE | os.O_EXCL | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	file, err := u.root.OpenFile(name, flags, 0o600)
	if err != nil {
		if err := u.clear(name); err != nil {
			return tolerate(err)
		}
		if file, err = u.root.OpenFile(name, flags, 0o600); err != nil {
			return tolerate(err)
		}
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{file}, content, u.buffer)
	if err == nil && u.uid >= 0 {
		err = file.Chown(u.uid, u.gid)
	}
	if err == nil {
		err = file.Chmod(mode)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		u.root.Remove(name)
		var errno syscall.Errno
		if !errors.As(err, &errno) {
			err = refuse(400, "bad_archive", "the tar is broken or cut: "+err.Error())
		}
		return "", err
	}
	u.root.Chtimes(name, changed, changed)
	return "", nil
}

func (u *unpacker) chown(name string) {
	if u.uid >= 0 {
		u.root.Lchown(name, u.uid, u.gid)
	}
}

// tolerate tells what concerns one member from what ends the extraction.
func tolerate(err error) (reason string, fatal error) {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS) {
		return "", err
	}
	return err.Error(), nil
}
