//go:build !linux

package process

import (
	"fmt"
	"net"
)

// ReservePort returns a TCP port of the loopback address that was free a moment ago.
// Nothing holds it: only Linux lets a server listen where another socket is bound.
// Release does nothing.
func ReservePort() (number int, release func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, nil, fmt.Errorf("reserve a port: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, func() error { return nil }, nil
}
