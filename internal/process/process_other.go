//go:build !linux

package process

import (
	"fmt"
	"net"
	"os/exec"
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

// EndWithParent does nothing: only Linux can tie a process to its parent. Where
// this program is killed, what it started has to be ended by hand.
func EndWithParent(*exec.Cmd) {}
