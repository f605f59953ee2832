package redistest_test

import (
	"bufio"
	"io"
	"net"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// waitLimit bounds every wait for a condition.
const waitLimit = time.Minute

// short is how long the tests wait for what shall not happen.
const short = 100 * time.Millisecond

// connection is a bare connection through a proxy. It ends after waitLimit.
type connection struct {
	t      *testing.T
	conn   net.Conn
	reader *bufio.Reader
}

func dial(t *testing.T, proxy *redistest.Proxy) *connection {
	t.Helper()
	conn, err := net.Dial("tcp", proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c := &connection{t: t, conn: conn, reader: bufio.NewReader(conn)}
	c.endAfter(waitLimit)
	return c
}

// endAfter makes everything fail with a timeout from d on.
func (c *connection) endAfter(d time.Duration) {
	c.t.Helper()
	if err := c.conn.SetDeadline(time.Now().Add(d)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *connection) send(command string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, command); err != nil {
		c.t.Fatal(err)
	}
}

// ping returns how long the server took to answer.
func (c *connection) ping() time.Duration {
	c.t.Helper()
	before := time.Now()
	c.send("PING\r\n")
	if reply, err := c.reader.ReadString('\n'); reply != "+PONG\r\n" || err != nil {
		c.t.Fatalf("ping got %q, %v", reply, err)
	}
	return time.Since(before)
}

// requireSilence checks that the connection is open and that nothing arrives.
func (c *connection) requireSilence() {
	c.t.Helper()
	c.endAfter(short)
	if b, err := c.reader.ReadByte(); !isTimeout(err) {
		c.t.Errorf("read got %q, %v; want silence", b, err)
	}
	c.endAfter(waitLimit)
}

// requireClosed checks that the connection ends and that nothing arrives.
func (c *connection) requireClosed() {
	c.t.Helper()
	if b, err := c.reader.ReadByte(); err == nil || isTimeout(err) {
		c.t.Errorf("read got %q, %v; want the connection closed", b, err)
	}
}
