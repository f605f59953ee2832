//go:build unix

// Cputime runs a command and prints its cost: the CPU time of its whole process tree, which
// depends little on who else uses the machine, and wall time.
//
//	go run ./scripts/cputime -budget 360 make test
//
// With -budget a command that passes must not have used more CPU seconds than that. One that has is run
// once more, because the same command takes up to a quarter longer in some runs than in others; the
// lesser of the two counts. With -record the seconds that count are written into a file.
//
// The exit status is the status of the command, 1 if it was over its budget or has left processes behind,
// and 2 if it could not be run.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// leftBehind is how long processes that outlive the command have to end.
const leftBehind = time.Minute

func main() {
	budget := flag.Float64("budget", 0, "CPU `seconds` that the command may use; 0 means any")
	record := flag.String("record", "", "`file` into which the CPU seconds are written")
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	os.Exit(run(flag.Args(), *budget, *record))
}

func run(command []string, budget float64, record string) (status int) {
	status, used := measure(command)
	if status == 0 && budget > 0 && used > budget {
		fmt.Printf("That is more than the budget of %.0f CPU seconds. Running it once more:\n", budget)
		var again float64
		status, again = measure(command)
		used = min(used, again)
	}
	if status != 0 {
		return status
	}
	if budget > 0 && used > budget {
		fmt.Printf("over budget: %.1f CPU seconds in the better of two runs; the budget is %.0f\n", used, budget)
		return 1
	}
	if record != "" {
		if err := os.WriteFile(record, []byte(strconv.FormatFloat(used, 'f', 1, 64)+"\n"), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}

// measure runs the command, prints its cost, and returns its exit status and CPU seconds.
func measure(command []string) (status int, used float64) {
	if err := adopt(); err != nil {
		fmt.Fprintln(os.Stderr, "processes that outlive their parents are not counted:", err)
	}
	before, start := usage(), time.Now()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2, 0
	}
	// The command gets a terminal's interrupts itself, and its cost is of interest then too.
	signal.Ignore(os.Interrupt)
	err := cmd.Wait()
	signal.Reset(os.Interrupt)
	wall := time.Since(start)
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		status = max(exit.ExitCode(), 1)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 2
	}
	if left := awaitOrphans(); len(left) > 0 {
		fmt.Printf("processes of the command still run: %s\n", strings.Join(left, ", "))
		status = max(status, 1)
	}
	after := usage()
	user, system := after[0]-before[0], after[1]-before[1]
	used = (user + system).Seconds()
	fmt.Printf("CPU time: %.1f s (user %.1f s, system %.1f s) of all processes; wall time: %.0f s\n",
		used, user.Seconds(), system.Seconds(), wall.Seconds())
	return status, used
}

// usage returns the user and system time of all processes that were waited for.
func usage() (times [2]time.Duration) {
	var of syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &of); err != nil {
		panic(err) // cannot fail with these arguments
	}
	return [2]time.Duration{time.Duration(of.Utime.Nano()), time.Duration(of.Stime.Nano())}
}

// awaitOrphans waits for the processes that the command has left, and returns those that do not end.
func awaitOrphans() (left []string) {
	for deadline := time.Now().Add(leftBehind); ; {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.ECHILD):
			return nil
		case err == nil && pid == 0 && time.Now().After(deadline):
			return children()
		case err == nil && pid == 0:
			time.Sleep(10 * time.Millisecond) // Wait4 has no deadline of its own
		}
	}
}
