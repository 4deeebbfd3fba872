package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"syscall"
)

// refusal is an answer other than success: a status, a word for programs and a sentence for people.
type refusal struct {
	status  int
	code    string
	message string
}

func (r *refusal) Error() string { return r.message }

func refuse(status int, code, message string) error { return &refusal{status, code, message} }

// reasons maps an errno to the reason of a file error and its status.
var reasons = map[syscall.Errno]struct {
	code   string
	status int
}{
	syscall.ENOENT: {"not_found", 404}, syscall.ESRCH: {"not_found", 404},
	syscall.EEXIST: {"exists", 409}, syscall.ENOTEMPTY: {"not_empty", 409},
	syscall.EACCES: {"denied", 403}, syscall.EPERM: {"denied", 403}, syscall.EROFS: {"denied", 403},
	syscall.ETXTBSY: {"denied", 403}, syscall.EBUSY: {"denied", 403},
	syscall.ENOTDIR: {"not_directory", 409}, syscall.EISDIR: {"is_directory", 409},
	syscall.ENOSPC: {"no_space", 507}, syscall.EDQUOT: {"no_space", 507},
	syscall.EFBIG: {"too_large", 413}, syscall.ENAMETOOLONG: {"too_large", 413},
	syscall.ENXIO: {"not_regular", 409}, syscall.ENODEV: {"not_regular", 409},
}

// asRefusal turns any error into an answer; what is no file error is ours.
func asRefusal(err error) *refusal {
	var known *refusal
	if errors.As(err, &known) {
		return known
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		if reason, ok := reasons[errno]; ok {
			return &refusal{reason.status, reason.code, err.Error()}
		}
		return &refusal{422, "other", err.Error()}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return &refusal{404, "not_found", err.Error()}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &refusal{408, "timeout", err.Error()}
	}
	return &refusal{500, "other", err.Error()}
}

func (r *refusal) answer(w http.ResponseWriter) {
	message := r.message
	if len(message) > 2000 {
		message = message[:2000]
	}
	body, _ := json.Marshal(map[string]string{"error": r.code, "message": message})
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	if r.status == http.StatusTooManyRequests {
		header.Set("Retry-After", "1")
	}
	w.WriteHeader(r.status)
	w.Write(body)
}

// quote makes text of a name of any bytes; the client turns it back exactly.
func quote(name string) string { return url.PathEscape(name) }

func answerJSON(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		asRefusal(err).answer(w)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.Write(body)
}
