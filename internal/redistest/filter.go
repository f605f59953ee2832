package redistest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// Filter is a proxy in front of a server that answers some commands itself, as proxies
// for Redis and managed services do with commands that they do not know.
type Filter struct {
	upstream string
	listener net.Listener
	answer   func(command []string) string
	answered atomic.Int64

	mu      sync.Mutex
	open    map[net.Conn]struct{} // nil once the filter is closed
	running sync.WaitGroup
}

// StartFilter makes a filter in front of upstream and closes it when the test ends.
// answer returns its own reply to a command, such as "-ERR unknown command", or "" to
// pass the command on.
func StartFilter(tb testing.TB, upstream string, answer func(command []string) string) *Filter {
	tb.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	f := &Filter{upstream: upstream, listener: listener, answer: answer, open: map[net.Conn]struct{}{}}
	if err == nil {
		f.running.Go(f.accept)
	}
	return stopAfter(tb, f, err, f.close)
}

// Cut is the reply of a filter that closes the connection.
const Cut = "cut"

// Refusing returns an answer for [StartFilter]: this reply to each of these commands.
func Refusing(reply string, commands ...string) func(command []string) string {
	return func(command []string) string {
		for _, name := range commands {
			if strings.EqualFold(name, command[0]) {
				return reply
			}
		}
		return ""
	}
}

// Addr is the filter's address, "127.0.0.1:port".
func (f *Filter) Addr() string { return f.listener.Addr().String() }

// Answered is how many commands the filter has answered itself.
func (f *Filter) Answered() int64 { return f.answered.Load() }

func (f *Filter) close() error {
	err := f.listener.Close()
	f.mu.Lock()
	for conn := range f.open {
		conn.Close()
	}
	f.open = nil
	f.mu.Unlock()
	f.running.Wait()
	return err
}

func (f *Filter) accept() {
	for {
		client, err := f.listener.Accept()
		if err != nil {
			return
		}
		f.running.Go(func() { f.serve(client) })
	}
}

// keep notes a connection for close, and reports whether the filter is still open.
func (f *Filter) keep(conn net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open == nil {
		return false
	}
	f.open[conn] = struct{}{}
	return true
}

func (f *Filter) serve(client net.Conn) {
	defer client.Close()
	server, err := net.DialTimeout("tcp", f.upstream, waitTimeout)
	if err != nil {
		return
	}
	defer server.Close()
	if !f.keep(client) || !f.keep(server) {
		return
	}
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.open, client)
		delete(f.open, server)
	}()
	// The replies in the order of the commands; "" stands for the server's next one.
	replies := make(chan string, 1024)
	var writing sync.WaitGroup
	writing.Go(func() {
		if writeReplies(client, bufio.NewReader(server), replies) != nil {
			client.Close()
		}
		for range replies {
			// The reader must not wait.
		}
	})
	f.readCommands(bufio.NewReader(client), bufio.NewWriter(server), replies)
	close(replies)
	writing.Wait()
}

// readCommands passes commands on until the client or the server has gone.
func (f *Filter) readCommands(client *bufio.Reader, server *bufio.Writer, replies chan<- string) {
	for {
		raw, words, err := readCommand(client)
		if err != nil {
			return
		}
		reply := f.answer(words)
		if reply == Cut {
			f.answered.Add(1)
			return
		}
		if reply != "" {
			f.answered.Add(1)
			reply += "\r\n"
		} else if _, err := server.Write(raw); err != nil {
			return
		}
		replies <- reply
		if client.Buffered() == 0 && server.Flush() != nil {
			return
		}
	}
}

func writeReplies(client io.Writer, server *bufio.Reader, replies <-chan string) error {
	to := bufio.NewWriter(client)
	for reply := range replies {
		if reply != "" {
			_, _ = to.WriteString(reply)
		} else if err := copyReply(to, server); err != nil {
			return err
		}
		if len(replies) == 0 {
			if err := to.Flush(); err != nil {
				return err
			}
		}
	}
	return to.Flush()
}

// readCommand reads a command, an array of texts, and returns it as it came as well.
func readCommand(from *bufio.Reader) (raw []byte, words []string, err error) {
	line, err := from.ReadBytes('\n')
	if err != nil {
		return nil, nil, err
	}
	n, err := sizeIn(line, '*')
	if err != nil || n < 1 {
		return nil, nil, fmt.Errorf("command %q: %w", line, err)
	}
	raw = line
	for range n {
		if line, err = from.ReadBytes('\n'); err != nil {
			return nil, nil, err
		}
		size, err := sizeIn(line, '$')
		if err != nil {
			return nil, nil, err
		}
		word := make([]byte, size+len("\r\n"))
		if _, err := io.ReadFull(from, word); err != nil {
			return nil, nil, err
		}
		raw = append(append(raw, line...), word...)
		words = append(words, string(word[:size]))
	}
	return raw, words, nil
}

// copyReply copies one reply of the second version of the protocol.
func copyReply(to io.Writer, from *bufio.Reader) error {
	line, err := from.ReadBytes('\n')
	if err != nil {
		return err
	}
	if _, err := to.Write(line); err != nil {
		return err
	}
	switch line[0] {
	case '$':
		size, err := sizeIn(line, '$')
		if err != nil || size < 0 {
			return err
		}
		_, err = io.CopyN(to, from, int64(size+len("\r\n")))
		return err
	case '*':
		n, err := sizeIn(line, '*')
		for i := 0; i < n && err == nil; i++ {
			err = copyReply(to, from)
		}
		return err
	}
	return nil
}

// sizeIn is the size in the first line of an array or a text.
func sizeIn(line []byte, kind byte) (int, error) {
	if len(line) < len("*1\r\n") || line[0] != kind {
		return 0, fmt.Errorf("%q begins with no %q", line, kind)
	}
	return strconv.Atoi(string(line[1 : len(line)-len("\r\n")]))
}
