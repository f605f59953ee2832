//go:build unix

package process

import (
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

func attributes(cmd *exec.Cmd) *syscall.SysProcAttr {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	return cmd.SysProcAttr
}

// OwnGroup makes a command that is yet to start ignore an interrupt that is typed
// at a terminal: that goes to the group of the program in the foreground.
func OwnGroup(cmd *exec.Cmd) { attributes(cmd).Setpgid = true }

// Pause stops a process: the system accepts connections and bytes for it, and it
// answers nothing until [Resume].
func Pause(pid int) error { return syscall.Kill(pid, syscall.SIGSTOP) }

// Resume lets a paused process continue.
func Resume(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }

// CPUTime is the processor time, user and system, that this program has used.
func CPUTime() (time.Duration, error) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0, fmt.Errorf("read the used processor time: %w", err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), nil
}
