package process

import (
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"syscall"
)

// ReservePort returns a TCP port of the loopback address that belongs to the
// caller until it calls release, which may be called again.
//
// A socket that is bound but does not listen holds the port. While no server listens on
// it connections are refused, the system gives the number to no other socket, and a
// server that names it (and sets SO_REUSEADDR, as Redis, Caddy and Go do) can listen.
// So a server that is down finds its port free when it comes back.
func ReservePort() (number int, release func() error, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, fmt.Errorf("reserve a port: socket: %w", err)
	}
	if number, err = bindAnyPort(fd); err != nil {
		return 0, nil, errors.Join(fmt.Errorf("reserve a port: %w", err), syscall.Close(fd))
	}
	return number, sync.OnceValue(func() error {
		if err := syscall.Close(fd); err != nil {
			return fmt.Errorf("release port %d: %w", number, err)
		}
		return nil
	}), nil
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

// EndWithParent makes a command that is yet to start be killed when the thread
// that starts it ends, at the latest with this program.
func EndWithParent(cmd *exec.Cmd) {
	attributes(cmd).Pdeathsig = syscall.SIGKILL
}
