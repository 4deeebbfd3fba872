package main

// capture keeps the first half and the last half of a limit's bytes of a stream, and counts the rest.
type capture struct {
	headLimit, tailLimit int
	head, tail           []byte
	// next is where the oldest byte of a full tail stands.
	next  int
	total int64
}

func newCapture(limit int) *capture {
	return &capture{headLimit: (limit + 1) / 2, tailLimit: limit / 2}
}

func (c *capture) write(data []byte) {
	c.total += int64(len(data))
	if room := c.headLimit - len(c.head); room > 0 {
		take := min(room, len(data))
		c.head = append(c.head, data[:take]...)
		data = data[take:]
	}
	if over := len(data) - c.tailLimit; over > 0 {
		data = data[over:]
		c.tail, c.next = c.tail[:0], 0
	}
	if room := c.tailLimit - len(c.tail); room > 0 && len(data) > 0 {
		take := min(room, len(data))
		c.grow(take)
		c.tail = append(c.tail, data[:take]...)
		data = data[take:]
	}
	for len(data) > 0 {
		n := copy(c.tail[c.next:], data)
		data = data[n:]
		c.next = (c.next + n) % c.tailLimit
	}
}

// grow doubles up to the limit and no further, where append would round up.
func (c *capture) grow(more int) {
	if need := len(c.tail) + more; need > cap(c.tail) {
		larger := make([]byte, len(c.tail), min(c.tailLimit, max(need, 2*cap(c.tail))))
		copy(larger, c.tail)
		c.tail = larger
	}
}

// parts are what was kept, in order.
func (c *capture) parts() [3][]byte {
	return [3][]byte{c.head, c.tail[c.next:], c.tail[:c.next]}
}

func (c *capture) kept() int { return len(c.head) + len(c.tail) }

func (c *capture) dropped() int64 { return c.total - int64(c.kept()) }
