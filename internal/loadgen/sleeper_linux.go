package loadgen

import (
	"os"
	"syscall"
	"time"
	"unsafe"
)

// Sleeper sleeps to some ten microseconds. A timer of Go may be late by a
// millisecond in a program that has nothing else to do, and a thread that sleeps
// in a system call keeps others from running for as long as that. This is a
// timer of the kernel that Go waits for as for a connection. It is for one
// goroutine.
type Sleeper struct {
	timer *os.File // nil if the system has none
	fd    uintptr
}

// NewSleeper makes one, which is to be closed.
func NewSleeper() *Sleeper {
	const monotonic = 1
	fd, _, errno := syscall.Syscall(syscall.SYS_TIMERFD_CREATE, monotonic, syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errno != 0 {
		return &Sleeper{}
	}
	return &Sleeper{timer: os.NewFile(fd, "timer"), fd: fd}
}

// Close frees the timer.
func (s *Sleeper) Close() {
	if s.timer != nil {
		_ = s.timer.Close()
	}
}

// Until sleeps until an instant.
func (s *Sleeper) Until(t time.Time) {
	for {
		left := time.Until(t)
		if left <= 0 {
			return
		}
		if s.timer == nil || !s.wait(left) {
			time.Sleep(left)
		}
	}
}

func (s *Sleeper) wait(d time.Duration) bool {
	// It goes off once.
	setting := struct{ again, first syscall.Timespec }{first: syscall.NsecToTimespec(int64(d))}
	_, _, errno := syscall.Syscall6(syscall.SYS_TIMERFD_SETTIME, s.fd, 0, uintptr(unsafe.Pointer(&setting)), 0, 0, 0)
	if errno != 0 {
		return false
	}
	var times [8]byte
	_, err := s.timer.Read(times[:])
	return err == nil
}
