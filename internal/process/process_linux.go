package process

import (
	"os/exec"
	"syscall"
)

// EndWithParent makes a command that is yet to start be killed when the thread
// that starts it ends, at the latest with this program.
func EndWithParent(cmd *exec.Cmd) {
	attributes(cmd).Pdeathsig = syscall.SIGKILL
}
