//go:build unix

package redisstore

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// killChildrenToo makes cmd.Cancel, which the end of the command's context calls, kill its
// children as well.
func killChildrenToo(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error {
		// The number of a group is not used again while one of its processes lives.
		err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		if errors.Is(err, syscall.ESRCH) {
			return os.ErrProcessDone
		}
		return err
	}
}
