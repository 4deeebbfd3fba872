package main

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"time"
)

// stream is a connection that was a request and is bytes in both directions from now on.
type stream struct {
	net.Conn
	buffered *bufio.Reader
}

func (s *stream) Read(data []byte) (int, error) {
	if s.buffered != nil {
		if s.buffered.Buffered() > 0 {
			return s.buffered.Read(data)
		}
		s.buffered = nil
	}
	return s.Conn.Read(data)
}

// CloseWrite ends our half where the connection can; it closes all of it where it can't.
func (s *stream) CloseWrite() error {
	if half, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return s.Conn.Close()
}

// upgrade takes a request's connection over. The request's body must have been read before; the caller closes the
// stream. Refusals come before it: afterwards there is no way to tell the client why.
func upgrade(w http.ResponseWriter, r *http.Request) (*stream, error) {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "orchard") {
		return nil, refuse(http.StatusUpgradeRequired, "not_upgraded", "ask with the headers Connection: Upgrade and Upgrade: orchard")
	}
	connection, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	if release, ok := r.Context().Value(releaseKey{}).(func()); ok {
		// A stream may stay open after its client has stopped: the client's other requests are its signs of life.
		release()
	}
	connection.SetDeadline(time.Time{})
	if _, err := connection.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: orchard\r\n\r\n")); err != nil {
		connection.Close()
		return nil, err
	}
	return &stream{Conn: connection, buffered: buffered.Reader}, nil
}
