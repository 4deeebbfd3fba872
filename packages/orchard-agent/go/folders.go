package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"sort"
)

const maxListed = 1_000_000

func (s *server) list(w http.ResponseWriter, r *http.Request) error {
	q, path, err := s.pathQuery(r)
	if err != nil {
		return err
	}
	limit, err := q.number("limit", 100_000, 10)
	if err != nil {
		return err
	}
	limit = min(limit, maxListed)
	names, err := listNames(path, int(limit))
	if err != nil {
		return err
	}
	sort.Strings(names)
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := bufio.NewWriterSize(w, 32<<10)
	encoder := json.NewEncoder(out)
	for _, name := range names {
		row, err := describePath(filepath.Join(path, name), name, false)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			row = []any{quote(name), "other", 0, 0, 0, 0, 0, nil}
		}
		if err := encoder.Encode(row); err != nil {
			return nil
		}
	}
	out.Flush()
	return nil
}

func listNames(path string, limit int) ([]string, error) {
	folder, err := openDirectory(path)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	var names []string
	for {
		more, err := folder.Readdirnames(4096)
		names = append(names, more...)
		if len(names) > limit {
			return nil, refuse(413, "too_large", fmt.Sprintf("the folder has more than %d entries", limit))
		}
		if err == io.EOF || (err == nil && len(more) == 0) {
			return names, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (s *server) stat(w http.ResponseWriter, r *http.Request) error {
	q, path, err := s.pathQuery(r)
	if err != nil {
		return err
	}
	row, err := describePath(path, filepath.Base(path), q.flag("follow"))
	if err != nil {
		return err
	}
	answerJSON(w, row)
	return nil
}

func (s *server) makeDir(w http.ResponseWriter, r *http.Request) error {
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
	if mode < 0 {
		mode = 0o755
	}
	parents := q.flag("parents")
	if parents {
		if err := makeParents(path, uid, gid); err != nil {
			return err
		}
	}
	err = os.Mkdir(path, 0o700)
	if errors.Is(err, fs.ErrExist) && parents {
		info, statErr := os.Stat(path)
		if statErr != nil {
			return statErr
		}
		if !info.IsDir() {
			return refuse(409, "not_directory", path+" exists and is not a directory")
		}
		answerJSON(w, map[string]any{})
		return nil
	}
	if err != nil {
		return err
	}
	if uid >= 0 {
		if err := os.Lchown(path, uid, gid); err != nil {
			return err
		}
	}
	// Chmod, because mkdir's mode is cut by the umask.
	if err := os.Chmod(path, fileMode(mode)); err != nil {
		return err
	}
	answerJSON(w, map[string]any{})
	return nil
}

func (s *server) remove(w http.ResponseWriter, r *http.Request) error {
	q, path, err := s.pathQuery(r)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(path); err != nil {
		return err
	}
	if q.flag("recursive") {
		err = removeTree(path)
	} else {
		err = os.Remove(path)
	}
	if err != nil {
		return err
	}
	answerJSON(w, map[string]any{})
	return nil
}
