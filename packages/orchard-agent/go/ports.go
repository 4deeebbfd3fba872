package main

import (
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"
)

const (
	dialTimeout = 5 * time.Second
	spliceBytes = 128 << 10
)

func portOf(r *http.Request, least uint64) (int, error) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port < least {
		return 0, refuse(400, "bad_request", "port must be "+strconv.FormatUint(least, 10)+" to 65535")
	}
	return int(port), nil
}

// connectPort joins the client's connection to a port on the inside loopback.
func (s *server) connectPort(w http.ResponseWriter, r *http.Request) error {
	port, err := portOf(r, 1)
	if err != nil {
		return err
	}
	inside, err := dialInside(port)
	if err != nil {
		return refuse(409, "not_listening", "nothing listens on port "+strconv.Itoa(port)+" inside: "+err.Error())
	}
	defer inside.Close()
	client, err := upgrade(w, r)
	if err != nil {
		return err
	}
	defer client.Close()
	join(client, inside)
	return nil
}

// dialInside tries both loopbacks, for what listens on one of them only.
func dialInside(port int) (net.Conn, error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	connection, err := dialer.Dial("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err == nil {
		return connection, nil
	}
	if other, otherErr := dialer.Dial("tcp6", net.JoinHostPort("::1", strconv.Itoa(port))); otherErr == nil {
		return other, nil
	}
	return nil, err
}

// join copies both ways until both have ended; where one breaks, the other is of no use either.
func join(client *stream, inside net.Conn) {
	var both sync.WaitGroup
	both.Add(2)
	way := func(to, from net.Conn) {
		defer both.Done()
		if err := transfer(to, from); err != nil {
			client.Close()
			inside.Close()
			return
		}
		if half, ok := to.(interface{ CloseWrite() error }); ok {
			half.CloseWrite()
		}
	}
	go way(inside, client)
	go way(client, inside)
	both.Wait()
}

// transfer copies to the end, within the kernel where both are sockets of it.
func transfer(to, from net.Conn) error {
	if one, ok := from.(*stream); ok {
		if err := one.flush(to); err != nil {
			return err
		}
	}
	to, from = bare(to), bare(from)
	if wide, ok := to.(*net.UnixConn); ok {
		// The kernel's default holds less than one of its copies moves.
		wide.SetWriteBuffer(1 << 20)
	}
	var err error
	_, inFiles := from.(*stdioConn)
	_, outFiles := to.(*stdioConn)
	if inFiles || outFiles {
		_, err = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, spliceBytes))
	} else {
		_, err = io.Copy(to, from)
	}
	return err
}

// bare is the socket below what counts and buffers it.
func bare(connection net.Conn) net.Conn {
	if one, ok := connection.(*stream); ok {
		connection = one.Conn
	}
	if one, ok := connection.(*limitConn); ok {
		connection = one.Conn
	}
	return connection
}

// flush writes what came with the request's head.
func (s *stream) flush(to io.Writer) error {
	if s.buffered == nil {
		return nil
	}
	data := make([]byte, s.buffered.Buffered())
	io.ReadFull(s.buffered, data)
	s.buffered = nil
	_, err := to.Write(data)
	return err
}

const (
	// maxReverse bounds the ports that lead outside, maxPending the connections that wait for the client at one.
	maxReverse    = 16
	maxPending    = 64
	acceptTimeout = 15 * time.Second
)

// The agent's frames of a reverse port.
const (
	frameListening = 0
	frameArrived   = 1
)

// reverse are the ports inside that lead through the client to a target of its choice.
type reverse struct {
	mu    sync.Mutex
	count uint64
	ports int
	// waiting are connections that the client was told of, by their number.
	waiting map[uint64]*arrival
}

type arrival struct {
	connection net.Conn
	// owner ends all that came through a port.
	owner *reversePort
	timer *time.Timer
}

type reversePort struct {
	pending int
	open    map[net.Conn]bool
	closed  bool
}

func newReverse() *reverse { return &reverse{waiting: map[uint64]*arrival{}} }

// add announces a connection; false where too many wait already.
func (v *reverse) add(owner *reversePort, connection net.Conn) (uint64, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if owner.closed || owner.pending >= maxPending {
		return 0, false
	}
	v.count++
	number := v.count
	owner.pending++
	v.waiting[number] = &arrival{connection, owner, time.AfterFunc(acceptTimeout, func() { v.reject(number) })}
	return number, true
}

// take hands a waiting connection over; nil where it waits no more.
func (v *reverse) take(number uint64) *arrival {
	v.mu.Lock()
	defer v.mu.Unlock()
	one := v.waiting[number]
	if one == nil {
		return nil
	}
	delete(v.waiting, number)
	one.timer.Stop()
	one.owner.pending--
	one.owner.open[one.connection] = true
	return one
}

func (v *reverse) reject(number uint64) {
	if one := v.take(number); one != nil {
		v.done(one)
	}
}

func (v *reverse) done(one *arrival) {
	v.mu.Lock()
	delete(one.owner.open, one.connection)
	v.mu.Unlock()
	one.connection.Close()
}

// end closes all that waits at a port or goes through it.
func (v *reverse) end(owner *reversePort) {
	v.mu.Lock()
	defer v.mu.Unlock()
	owner.closed = true
	for number, one := range v.waiting {
		if one.owner == owner {
			delete(v.waiting, number)
			one.timer.Stop()
			one.connection.Close()
		}
	}
	for connection := range owner.open {
		connection.Close()
	}
}

// servePort listens inside for as long as the client keeps this stream.
func (s *server) servePort(w http.ResponseWriter, r *http.Request) error {
	port, err := portOf(r, 0)
	if err != nil {
		return err
	}
	v := s.reverse
	v.mu.Lock()
	if v.ports >= maxReverse {
		v.mu.Unlock()
		return refuse(429, "too_many_ports", "too many reverse ports are open; the limit is "+strconv.Itoa(maxReverse))
	}
	v.ports++
	v.mu.Unlock()
	defer func() { v.mu.Lock(); v.ports--; v.mu.Unlock() }()
	listener, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return refuse(409, "port_taken", "port "+strconv.Itoa(port)+" can't be opened inside: "+os.NewSyscallError("listen", err).Error())
	}
	defer listener.Close()
	client, err := upgrade(w, r)
	if err != nil {
		return err
	}
	defer client.Close()
	owner := &reversePort{open: map[net.Conn]bool{}}
	defer v.end(owner)
	go func() {
		// The client says nothing here: what comes is its end.
		client.Read(make([]byte, 1))
		listener.Close()
		client.Close()
	}()
	frames := &frameWriter{to: client}
	opened := listener.Addr().(*net.TCPAddr).Port
	if frames.writeJSON(frameListening, map[string]int{"port": opened}) != nil {
		return nil
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			if isTemporary(err) {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			return nil
		}
		number, taken := v.add(owner, connection)
		if !taken {
			connection.Close()
			continue
		}
		if frames.writeJSON(frameArrived, map[string]uint64{"id": number}) != nil {
			return nil
		}
	}
}

func isTemporary(err error) bool {
	one, ok := err.(net.Error)
	return ok && one.Temporary()
}

func arrivalNumber(r *http.Request) uint64 {
	number, _ := strconv.ParseUint(r.URL.Query().Get("id"), 10, 64)
	return number
}

// acceptPort joins the client's connection to one that was announced.
func (s *server) acceptPort(w http.ResponseWriter, r *http.Request) error {
	one := s.reverse.take(arrivalNumber(r))
	if one == nil {
		return refuse(404, "not_waiting", "this connection no longer waits")
	}
	defer s.reverse.done(one)
	client, err := upgrade(w, r)
	if err != nil {
		return err
	}
	defer client.Close()
	join(client, one.connection)
	return nil
}

func (s *server) rejectPort(w http.ResponseWriter, r *http.Request) error {
	s.reverse.reject(arrivalNumber(r))
	answerJSON(w, map[string]any{})
	return nil
}
