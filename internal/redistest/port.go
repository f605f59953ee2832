package redistest

import (
	"net"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

const loopback = "127.0.0.1"

// port is a TCP port of the loopback address, reserved until it is released, see
// [process.ReservePort].
type port struct {
	number  int
	release func() error
}

func reservePort() (*port, error) {
	number, release, err := process.ReservePort()
	if err != nil {
		return nil, err
	}
	return &port{number, release}, nil
}

// addr is the port's address as host:port.
func (p *port) addr() string {
	return net.JoinHostPort(loopback, strconv.Itoa(p.number))
}
