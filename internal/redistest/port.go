package redistest

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"sync"
	"syscall"
)

const loopback = "127.0.0.1"

// port is a TCP port of the loopback address, reserved until it is released.
//
// A socket that is bound but does not listen holds the port. While no server
// listens on it connections are refused, the system gives the number to nobody
// else, and a server that names it (and sets SO_REUSEADDR, as Redis and Go do)
// can listen. So a server that is down finds its port free when it comes back.
type port struct {
	number  int
	release func() error
}

func reservePort() (*port, error) {
	// The lock keeps a child that is being started from inheriting the socket.
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, fmt.Errorf("reserve a port: socket: %w", err)
	}

	number, err := bindAnyPort(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("reserve a port: %w", err), syscall.Close(fd))
	}
	p := &port{number: number}
	p.release = sync.OnceValue(func() error {
		if err := syscall.Close(fd); err != nil {
			return fmt.Errorf("release port %d: %w", number, err)
		}
		return nil
	})
	// Other systems let nobody listen where another socket is bound. There the
	// port is only known to have been free.
	if runtime.GOOS != "linux" {
		return p, p.release()
	}
	return p, nil
}

// bindAnyPort binds fd to a free port of the loopback address.
func bindAnyPort(fd int) (int, error) {
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return 0, fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, fmt.Errorf("bind: %w", err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, fmt.Errorf("getsockname: %w", err)
	}
	addr, ok := bound.(*syscall.SockaddrInet4)
	if !ok {
		return 0, fmt.Errorf("getsockname: got %T for an IPv4 socket", bound)
	}
	return addr.Port, nil
}

// addr is the port's address as host:port.
func (p *port) addr() string {
	return net.JoinHostPort(loopback, strconv.Itoa(p.number))
}
