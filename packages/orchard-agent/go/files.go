package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

const copyBytes = 256 << 10

// openRegular never blocks on a FIFO and never starts a device: anything but a regular file is refused.
func openRegular(path string, flags int, perm uint32) (*os.File, fs.FileInfo, error) {
	file, err := os.OpenFile(path, flags|syscall.O_NONBLOCK|syscall.O_NOCTTY, fs.FileMode(perm))
	if err != nil {
		return nil, nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		code := "not_regular"
		if info.IsDir() {
			code = "is_directory"
		}
		err = refuse(409, code, fmt.Sprintf("%s is not a regular file (%s)", path, info.Mode().Type()))
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
}

func (s *server) readFile(w http.ResponseWriter, r *http.Request) error {
	q, path, err := s.pathQuery(r)
	if err != nil {
		return err
	}
	offset, err := q.number("offset", 0, 10)
	if err != nil {
		return err
	}
	length, err := q.number("length", 1<<62, 10)
	if err != nil {
		return err
	}
	file, info, err := openRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	header := w.Header()
	header.Set("Content-Type", "application/octet-stream")
	header.Set("X-Orchard-Size", strconv.FormatInt(info.Size(), 10))
	if offset > 0 {
		if _, err := file.Seek(offset, io.SeekStart); err != nil {
			return err
		}
	}
	if info.Size() > 0 {
		length = min(length, max(0, info.Size()-offset))
		header.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	// A size of 0 may be a file of /proc, whose size only reading tells: such an answer is chunked.
	n, err := io.Copy(w, io.LimitReader(file, length))
	if err != nil || (info.Size() > 0 && n < length) {
		// The status is sent: only a broken connection can say that this is not all.
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (s *server) writeFile(w http.ResponseWriter, r *http.Request) error {
	q, path, err := s.pathQuery(r)
	if err != nil {
		return err
	}
	mode, err := q.mode("mode")
	if err != nil {
		return err
	}
	uid, gid, err := s.owner(q)
	if err != nil {
		return err
	}
	if q.flag("parents") {
		if err := makeParents(path, uid, gid); err != nil {
			return err
		}
	}
	var written int64
	if q.values.Has("offset") {
		offset, err := q.number("offset", 0, 10)
		if err != nil {
			return err
		}
		written, err = writeInPlace(path, r.Body, offset, false, mode)
		if err != nil {
			return err
		}
	} else if written, err = writeWhole(path, r.Body, mode, uid, gid); err != nil {
		return err
	}
	answerJSON(w, map[string]any{"written": written})
	return nil
}

func writeInPlace(path string, body io.Reader, offset int64, truncate bool, mode int64) (int64, error) {
	flags := os.O_WRONLY | os.O_CREATE
	file, _, err := openRegular(path, flags, 0o644)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	if truncate {
		if err := file.Truncate(0); err != nil {
			return 0, err
		}
	}
	if _, err := file.Seek(offset, io.SeekStart); err != nil {
		return 0, err
	}
	written, err := copyBody(file, body)
	if err == nil && mode >= 0 {
		err = file.Chmod(fileMode(mode))
	}
	return written, errors.Join(err, file.Close())
}

// copyBody tells an error of the connection from one of the file.
func copyBody(file *os.File, body io.Reader) (int64, error) {
	written, err := io.CopyBuffer(struct{ io.Writer }{file}, struct{ io.Reader }{body}, make([]byte, copyBytes))
	var errno syscall.Errno
	if err != nil && !errors.As(err, &errno) {
		err = refuse(400, "bad_request", "the body ended early: "+err.Error())
	}
	return written, err
}

// writeWhole replaces a file in one step: what is there before is there until all of the new is.
func writeWhole(path string, body io.Reader, mode int64, uid, gid int) (int64, error) {
	target, info, err := resolveTarget(path)
	if err != nil {
		return 0, err
	}
	folder := filepath.Dir(target)
	suffix := make([]byte, 8)
	rand.Read(suffix)
	temporary := filepath.Join(folder, ".orchard-"+hex.EncodeToString(suffix))
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		if info != nil && (errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)) {
			// The file may be written though its folder may not, a bind-mounted one for instance.
			return writeInPlace(target, body, 0, true, mode)
		}
		return 0, err
	}
	written, err := fillTemporary(file, body, info, mode, uid, gid)
	err = errors.Join(err, file.Close())
	if err == nil {
		err = os.Rename(temporary, target)
	}
	if err != nil {
		os.Remove(temporary)
		return 0, err
	}
	return written, nil
}

func fillTemporary(file *os.File, body io.Reader, info fs.FileInfo, mode int64, uid, gid int) (int64, error) {
	written, err := copyBody(file, body)
	if err != nil {
		return 0, err
	}
	if info != nil && uid < 0 {
		if raw, ok := info.Sys().(*syscall.Stat_t); ok && os.Getuid() == 0 {
			uid, gid = int(raw.Uid), int(raw.Gid)
		}
	}
	if uid >= 0 {
		if err := file.Chown(uid, gid); err != nil {
			return 0, err
		}
	}
	permissions := fs.FileMode(0o644)
	switch {
	case mode >= 0:
		permissions = fileMode(mode)
	case info != nil:
		permissions = info.Mode().Perm()
	}
	return written, file.Chmod(permissions)
}

// resolveTarget follows links to the file that a write would change; info is nil where there is none yet.
func resolveTarget(path string) (string, fs.FileInfo, error) {
	for range 40 {
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			if _, err := os.Stat(filepath.Dir(path)); err != nil {
				return "", nil, err
			}
			return path, nil, nil
		}
		if err != nil {
			return "", nil, err
		}
		switch mode := info.Mode(); {
		case mode.IsRegular():
			return path, info, nil
		case mode.IsDir():
			return "", nil, refuse(409, "is_directory", path+" is a directory")
		case mode&fs.ModeSymlink == 0:
			return "", nil, refuse(409, "not_regular", path+" is not a regular file")
		}
		link, err := os.Readlink(path)
		if err != nil {
			return "", nil, err
		}
		if !filepath.IsAbs(link) {
			// Not Join, which would cut a ".." that must be walked through a linked folder.
			link = filepath.Dir(path) + "/" + link
		}
		path = link
	}
	return "", nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
}
