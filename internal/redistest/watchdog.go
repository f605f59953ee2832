package redistest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// watchdogScript runs a server ("$2" and what follows) and kills it once the
// standard input ends, which it does when this program is gone, however it
// went; the directory "$1" then goes too. The script is the server's parent and
// does not reap it before killing it, so the process id cannot have passed to
// another process in the meantime.
//
// The orders are "kill", which leaves the directory until the next order or the end of
// the input, and "release", which leaves it for good. Signals are ignored because the
// system sends SIGHUP when this program ends while the server is stopped. The server
// inherits descriptor 3, and closes it by exiting. A child that the server had started
// to save its data may go on writing to the directory for a while.
const watchdogScript = `
trap '' HUP INT TERM
dir=$1
shift
"$@" </dev/null >>"$dir/` + logFile + `" 2>&1 &
pid=$!
exec 3>&-
echo "$pid"
read -r order
kill -KILL "$pid"
wait "$pid"
if [ "$order" = kill ]; then
	echo killed
	read -r order
fi
[ "$order" = release ] && exit
tries=0
until rm -rf -- "$dir" 2>/dev/null; do
	tries=$((tries + 1))
	[ "$tries" -lt 600 ] || exit 1
	sleep 0.1
done
`

const logFile = "server.log"

// watchdog is a shell that runs one server process and outlives this program
// for as long as it takes to clean up.
type watchdog struct {
	pid     int             // the server's process id
	exited  <-chan struct{} // closed once the server has ended
	killed  bool
	cmd     *exec.Cmd
	orders  io.WriteCloser
	replies *bufio.Reader
}

// watch starts the command argv under a watchdog that owns dir.
func watch(dir string, argv []string) (*watchdog, error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", watchdogScript, "sh", dir}, argv...)...)
	// An interrupt typed at a terminal goes to the foreground process group.
	// The server must not get it before this program has decided what to do.
	process.OwnGroup(cmd)
	orders, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	replies, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	life, inherited, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	cmd.ExtraFiles = []*os.File{inherited}
	err = cmd.Start()
	inherited.Close()
	if err != nil {
		life.Close()
		return nil, fmt.Errorf("start watchdog: %w", err)
	}

	exited := make(chan struct{})
	go func() {
		defer close(exited)
		defer life.Close()
		// No process writes; the copy ends with the last process that could.
		_, _ = io.Copy(io.Discard, life)
	}()
	w := &watchdog{exited: exited, cmd: cmd, orders: orders, replies: bufio.NewReader(replies)}
	reply, err := w.reply()
	if err == nil {
		w.pid, err = strconv.Atoi(reply)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read the server's process id: %w", err), w.end())
	}
	return w, nil
}

func (w *watchdog) reply() (string, error) {
	line, err := w.replies.ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

// signal sends a signal to the server, and to nothing else.
func (w *watchdog) signal(send func(pid int) error) error {
	if w.killed {
		return errors.New("the process was killed")
	}
	return send(w.pid)
}

// kill kills the server, stopped or not, and returns when it is gone. The
// directory stays as long as the watchdog does.
func (w *watchdog) kill() error {
	if w.killed {
		return nil
	}
	if _, err := io.WriteString(w.orders, "kill\n"); err != nil {
		return fmt.Errorf("order watchdog to kill process %d: %w", w.pid, err)
	}
	if _, err := w.reply(); err != nil {
		return fmt.Errorf("wait until watchdog killed process %d: %w", w.pid, err)
	}
	w.killed = true
	return nil
}

// release ends the watchdog of a server that was killed and leaves the
// directory to another one.
func (w *watchdog) release() error {
	_, err := io.WriteString(w.orders, "release\n")
	return errors.Join(err, w.end())
}

// end kills the server if that did not happen before, and removes the
// directory unless it was released.
func (w *watchdog) end() error {
	if err := errors.Join(w.orders.Close(), w.cmd.Wait()); err != nil {
		return fmt.Errorf("end watchdog: %w", err)
	}
	return nil
}

// serverLog is what the server that runs in dir wrote last.
func serverLog(dir string) string {
	const most = 4096
	text, err := os.ReadFile(filepath.Join(dir, logFile))
	if err != nil {
		return "no log: " + err.Error()
	}
	return strings.TrimSpace(string(text[max(0, len(text)-most):]))
}
