package caddyproc

import (
	"fmt"
	"net"
	"time"
)

// FreeAddrs returns n loopback addresses, host:port, that were free a moment
// ago.
func FreeAddrs(n int) (addrs []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer l.Close()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}

// awaitListening waits until somebody listens on all of the addresses.
func awaitListening(addrs []string, ended <-chan struct{}) error {
	deadline := time.Now().Add(time.Minute)
	for _, addr := range addrs {
		for {
			conn, err := net.Dial("tcp", addr)
			if err == nil {
				_ = conn.Close()
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("wait for caddy: %w", err)
			}
			select {
			case <-ended:
				return fmt.Errorf("caddy ended before it listened on %s", addr)
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}
