// Command call calls a URL by one of the Go clients that people use, which tries again when it
// is refused, as it does by default or as its documentation says. It prints the last status.
//
//	call <client> <url> <name> <value> ...   with request headers
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"

	"github.com/google/go-github/v74/github"
	"github.com/hashicorp/go-retryablehttp"
)

const retries = 2

var clients = map[string]func(address string, headers http.Header) (status int, err error){
	"go-github": goGitHub, "go-retryablehttp": goRetryableHTTP,
}

func main() {
	headers := http.Header{}
	for i := 3; i+1 < len(os.Args); i += 2 {
		headers.Set(os.Args[i], os.Args[i+1])
	}
	status, err := clients[os.Args[1]](os.Args[2], headers)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(status)
}

// goGitHub asks again at once: without events left, the client sends nothing before the reset.
func goGitHub(address string, headers http.Header) (status int, err error) {
	client := github.NewClient(nil)
	if client.BaseURL, err = url.Parse(address + "/"); err != nil {
		return 0, err
	}
	ctx := context.WithValue(context.Background(), github.SleepUntilPrimaryRateLimitResetWhenRateLimited, true)
	for try := 0; ; try++ {
		req, err := client.NewRequest(http.MethodGet, "", nil)
		if err != nil {
			return 0, err
		}
		for name := range headers {
			req.Header.Set(name, headers.Get(name))
		}
		resp, err := client.BareDo(ctx, req)
		var refused *github.ErrorResponse
		switch {
		case errors.As(err, &refused) && try < retries:
			continue
		case errors.As(err, &refused):
			return refused.Response.StatusCode, nil
		case err != nil:
			return 0, err
		}
		return resp.StatusCode, resp.Body.Close()
	}
}

func goRetryableHTTP(address string, headers http.Header) (status int, err error) {
	client := retryablehttp.NewClient()
	client.RetryMax, client.Logger, client.ErrorHandler = retries, nil, retryablehttp.PassthroughErrorHandler
	req, err := retryablehttp.NewRequest(http.MethodGet, address, nil)
	if err != nil {
		return 0, err
	}
	req.Header = headers
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}
