package process

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// OwnGroup makes a command that is yet to start ignore an interrupt that is typed
// at a console.
func OwnGroup(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.CreationFlags |= syscall.CREATE_NEW_PROCESS_GROUP
}

// Pause fails: Windows does not stop processes.
func Pause(int) error { return errors.ErrUnsupported }

// Resume fails: Windows does not stop processes.
func Resume(int) error { return errors.ErrUnsupported }

// CPUTime is the processor time, user and system, that this program has used.
func CPUTime() (time.Duration, error) {
	self, err := syscall.GetCurrentProcess()
	if err != nil {
		return 0, fmt.Errorf("read the used processor time: %w", err)
	}
	var created, exited, kernel, user syscall.Filetime
	if err := syscall.GetProcessTimes(self, &created, &exited, &kernel, &user); err != nil {
		return 0, fmt.Errorf("read the used processor time: %w", err)
	}
	return ticks(kernel) + ticks(user), nil
}

// ticks is a duration, which Windows counts in steps of 100 ns.
func ticks(t syscall.Filetime) time.Duration {
	return time.Duration(int64(t.HighDateTime)<<32|int64(t.LowDateTime)) * 100
}
