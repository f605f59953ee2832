package redistest

import (
	"errors"
	"net"
	"syscall"
	"testing"
)

func TestReservedPort(t *testing.T) {
	p, err := reservePort()
	if err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", p.addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial got %v, %v; want connection refused", conn, err)
	}
	for range 2 {
		listener, err := net.Listen("tcp", p.addr())
		if err != nil {
			t.Fatalf("listen on a reserved port: %v", err)
		}
		listener.Close()
	}
	for range 2 {
		if err := p.release(); err != nil {
			t.Errorf("release: %v", err)
		}
	}
}

func TestLaunchTakesAnotherPortIfOneIsLost(t *testing.T) {
	lost, err := reservePort()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", lost.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()

	ports := 0
	s, err := launch(Options{}, func() (*port, error) {
		if ports++; ports == 1 {
			return lost, nil
		}
		return reservePort()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	}()
	if ports != 2 || s.Addr() == lost.addr() {
		t.Errorf("listening on %s after %d ports; want the second port, not %s", s.Addr(), ports, lost.addr())
	}

	ports = 0
	_, err = launch(Options{}, func() (*port, error) {
		ports++
		return lost, nil
	})
	if !errors.Is(err, errPortTaken) {
		t.Errorf("got error %v after %d ports, want %v", err, ports, errPortTaken)
	}
}
