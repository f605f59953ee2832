package examples

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.yaml.in/yaml/v3"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const (
	composeDir     = "contrib/docker"
	composeCaddy   = composeDir + "/caddy/Caddyfile"
	composeSecret  = "redis-password"
	dockerfile     = composeDir + "/Dockerfile"
	kubernetesFile = "contrib/kubernetes/caddy.yaml"
	chartFile      = "contrib/kubernetes/chart/Chart.yaml"
)

// deliveryAtExit returns how long the limiter may deliver charges when Caddy ends.
func deliveryAtExit(t *testing.T) time.Duration {
	t.Helper()
	flush, err := os.ReadFile("internal/stores/flush.go")
	must(t, "read", err)
	seconds := regexp.MustCompile(`\texitTimeout = (\d+) \* time\.Second\n`).FindSubmatch(flush)
	must(t, "internal/stores", want("naming the time for charges at the end", seconds != nil, true))
	longest, err := time.ParseDuration(string(seconds[1]) + "s")
	must(t, "parse", err)
	return longest
}

// compose has the keys of the compose file that tests check. The tests in contrib load the file by
// its schema.
type compose struct {
	Services map[string]composeService
	Networks map[string]struct{ Internal bool }
	Secrets  map[string]struct{ File string }
}

type composeService struct {
	Image       string
	Build       string
	Command     []string
	Environment map[string]string
	Ports       []string
	Volumes     []string
	Secrets     []string
	Networks    []string
	StopGrace   string `yaml:"stop_grace_period"`
	DependsOn   map[string]struct {
		Condition string
	} `yaml:"depends_on"`
	Healthcheck struct{ Test []string }
}

func readCompose(t *testing.T) compose {
	t.Helper()
	return readYAML[compose](t, composeDir+"/compose.yml")
}

// password returns what the compose file's secret has.
func (c compose) password(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(path.Join(composeDir, c.Secrets[composeSecret].File))
	must(t, "read the password", err)
	return strings.TrimSuffix(string(text), "\n")
}

// redisSettings returns the settings of a service's configuration file, as arguments of
// redis-server.
func (s composeService) redisSettings(t *testing.T) (args []string) {
	t.Helper()
	must(t, "the command", want("its number of words", len(s.Command) >= 2, true))
	text, err := os.ReadFile(s.mounts()[s.Command[1]])
	must(t, "read the settings of Redis", err)
	for line := range strings.Lines(string(text)) {
		if setting, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && setting != "#" {
			args = append(args, "--"+setting, value)
		}
	}
	return args
}

// mounts returns what a service mounts of the repository, by its path in the container.
func (s composeService) mounts() map[string]string {
	files := map[string]string{}
	for _, volume := range s.Volumes {
		if parts := strings.Split(volume, ":"); strings.HasPrefix(parts[0], ".") {
			files[parts[1]] = path.Join(composeDir, parts[0])
		}
	}
	return files
}

// manifest has the fields of Kubernetes's objects that tests check.
type manifest struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		Selector map[string]any
		Ports    []struct {
			TargetPort string `yaml:"targetPort"`
		}
		Template struct {
			Metadata struct{ Labels, Annotations map[string]string }
			Spec     podSpec
		}
	}
}

type podSpec struct {
	TerminationGracePeriodSeconds int `yaml:"terminationGracePeriodSeconds"`
	SecurityContext               struct {
		RunAsUser int `yaml:"runAsUser"`
	} `yaml:"securityContext"`
	Containers []struct {
		Ports []struct {
			Name          string
			ContainerPort int `yaml:"containerPort"`
		}
		ReadinessProbe probe `yaml:"readinessProbe"`
		LivenessProbe  probe `yaml:"livenessProbe"`
		VolumeMounts   []struct {
			Name      string
			MountPath string `yaml:"mountPath"`
		} `yaml:"volumeMounts"`
	}
	Volumes []struct {
		Name      string
		ConfigMap struct{ Name string } `yaml:"configMap"`
		Secret    struct {
			SecretName string `yaml:"secretName"`
		}
	}
}

type probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
}

// readManifests returns the objects for Kubernetes by kind.
func readManifests(t *testing.T) map[string]manifest {
	t.Helper()
	text, err := os.ReadFile(kubernetesFile)
	must(t, "read", err)
	objects := map[string]manifest{}
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var m manifest
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return objects
		} else if must(t, "decode the manifest", err); m.Kind != "" {
			objects[m.Kind] = m
		}
	}
}

// deployedCaddyfiles returns the Caddyfiles of contrib by the file that has them.
func deployedCaddyfiles(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(composeCaddy)
	must(t, "read", err)
	return map[string]string{composeCaddy: string(text), kubernetesFile: readManifests(t)["ConfigMap"].Data["Caddyfile"]}
}

// deployed is what tests need of a Caddyfile's JSON.
type deployed struct {
	Admin json.RawMessage
	Apps  struct {
		HTTP struct {
			GracePeriod   caddy.Duration `json:"grace_period"`
			ShutdownDelay caddy.Duration `json:"shutdown_delay"`
			Servers       map[string]struct{ Listen []string }
		}
		RateLimit struct {
			Stores map[string]struct {
				Shards []struct {
					Primary  string
					Replicas []string
				}
			}
		} `json:"rate_limit"`
	}
}

func readDeployed(t *testing.T, caddyfile string) (d deployed) {
	t.Helper()
	text, err := adapt(caddyfile)
	must(t, "adapt", err)
	must(t, "unmarshal", json.Unmarshal(text, &d))
	return d
}

// ports are those on which the sites listen.
func (d deployed) ports() (ports []string) {
	for _, server := range d.Apps.HTTP.Servers {
		for _, address := range server.Listen {
			ports = append(ports, strings.TrimPrefix(address, ":"))
		}
	}
	slices.Sort(ports)
	return ports
}

// ending is how long Caddy may take to end its requests.
func (d deployed) ending() time.Duration {
	return time.Duration(d.Apps.HTTP.ShutdownDelay + d.Apps.HTTP.GracePeriod)
}

// TestDeployedCaddyfilesLoad without a warning, and that they are formatted.
func TestDeployedCaddyfilesLoad(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	password := filepath.Join(t.TempDir(), "password")
	must(t, "write", os.WriteFile(password, []byte("secret"), 0o600))
	for name, text := range deployedCaddyfiles(t) {
		isFormattedAndLoads(t, name, regexp.MustCompile(`\{file\./run/secrets/[^}]*\}`).ReplaceAllString(text, "{file."+password+"}"))
	}
}

// TestComposeServes runs Caddy with the Caddyfile of the compose file, and Redis with the settings
// that are there. Only addresses, timeouts, the window and the place of the password differ.
func TestComposeServes(t *testing.T) {
	t.Parallel()
	c := readCompose(t)
	shards := caddytest.StartShards(t, 2, 1, redistest.Args(c.Services["redis-a1"].redisSettings(t)...))
	metrics := caddytest.FreeAddr(t)
	secret := "password {file./run/secrets/" + composeSecret + "}"
	mounted, err := filepath.Abs(path.Join(composeDir, c.Secrets[composeSecret].File))
	must(t, "the secret", err)
	text := deployedCaddyfiles(t)[composeCaddy]
	for from, to := range map[string]string{
		"redis-a1:6379": shards[0].Primary.Addr(), "redis-a2:6379": shards[0].Replicas[0].Addr(),
		"redis-b1:6379": shards[1].Primary.Addr(), "redis-b2:6379": shards[1].Replicas[0].Addr(),
		"\tgrace_period ":            "\t{{global}}\n\tgrace_period ",
		"\n:8080 {":                  "\n{{site}} {",
		"\n:9180 {":                  "\nhttp://" + metrics + " {",
		"events 10\n\t\t\twindow 1m": "events 10\n\t\t\twindow 1h",
		secret:                       "password {file." + mounted + "}\n" + strings.Join(caddytest.Patient, "\n"),
	} {
		must(t, "replace "+from, want("its number in the Caddyfile", strings.Count(text, from), 1))
		text = strings.Replace(text, from, to, 1)
	}
	server := caddytest.Start(t, text)
	for used := int64(1); used <= 10; used++ {
		must(t, "a request", server.Ask("/").Shows(http.StatusOK, 10, used))
	}
	must(t, "the eleventh request", server.Ask("/").Refuses("api"))
	shards.AwaitCounts(t, "api", map[string]int64{"127.0.0.1": 10})
	for page, text := range map[string]string{"/metrics": metricPrefix + `requests_total{zone="api"} 11`, "/healthz": ""} {
		resp, err := server.Client.Get("http://" + metrics + page)
		must(t, "get "+page, err)
		body, err := io.ReadAll(resp.Body)
		must(t, "read "+page, errors.Join(err, resp.Body.Close(), want("status", resp.StatusCode, http.StatusOK)))
		must(t, page, want("having "+text, strings.Contains(string(body), text), true))
	}
}

// TestComposeNamesWhatExists checks files, that images have versions, that of Redis the tested one,
// and that no port is open to other machines.
func TestComposeNamesWhatExists(t *testing.T) {
	t.Parallel()
	c := readCompose(t)
	health, err := os.ReadFile("internal/redis/operate/health.go")
	must(t, "read", err)
	tested := regexp.MustCompile(`valkey: \{(\d+), (\d+)\}`).FindSubmatch(health)
	must(t, "internal/redis", want("naming the tested version", tested != nil, true))
	mounted := 0
	for name, service := range c.Services {
		if service.Build != "" {
			must(t, "build of "+name, want("Dockerfile", path.Join(composeDir, service.Build, "Dockerfile"), dockerfile))
		} else if !regexp.MustCompile(`:v?\d+\.\d`).MatchString(service.Image) {
			t.Errorf("%s: image %s has no version", name, service.Image)
		}
		for _, file := range service.mounts() {
			mounted++
			_, err := os.Stat(file)
			must(t, name, err)
		}
		if strings.HasPrefix(name, "redis-") {
			must(t, name, want("image", service.Image, fmt.Sprintf("valkey/valkey:%s.%s-alpine", tested[1], tested[2])))
		}
		for needed, how := range service.DependsOn {
			if how.Condition != "service_healthy" || len(c.Services[needed].Healthcheck.Test) == 0 {
				t.Errorf("%s waits for %s, whose health is not checked", name, needed)
			}
		}
		for _, port := range service.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s publishes %s to other machines", name, port)
			}
		}
	}
	must(t, "the compose file", want("mounted files", mounted, 10))
}

// TestComposeAgrees checks ports and addresses of the compose file, its Caddyfile, Prometheus and
// Grafana against each other.
func TestComposeAgrees(t *testing.T) {
	t.Parallel()
	c, config := readCompose(t), readDeployed(t, deployedCaddyfiles(t)[composeCaddy])
	must(t, "the Caddyfile", errors.Join(want("ports", fmt.Sprint(config.ports()), "[8080 9180]"),
		want("the admin endpoint being Caddy's default", len(config.Admin), 0)))
	must(t, "caddy", want("published", fmt.Sprint(c.Services["caddy"].Ports), "[127.0.0.1:8080:8080]"))
	must(t, "caddy", want("mounted Caddyfile", c.Services["caddy"].mounts()["/etc/caddy"]+"/Caddyfile", composeCaddy))
	must(t, "caddy", errors.Join(want("secrets", fmt.Sprint(c.Services["caddy"].Secrets), "["+composeSecret+"]"), want("variables", len(c.Services["caddy"].Environment), 0)))
	must(t, "the network of Redis", want("internal", c.Networks["redis"].Internal, true))

	shards := config.Apps.RateLimit.Stores["default"].Shards
	must(t, "the store", want("shards", len(shards), 2))
	for _, shard := range shards {
		primary, port, _ := strings.Cut(shard.Primary, ":")
		replica, replicaPort, _ := strings.Cut(shard.Replicas[0], ":")
		must(t, primary, errors.Join(want("port", port, "6379"), want("port of the replica", replicaPort, "6379"), want("replicas", len(shard.Replicas), 1)))
		text := strings.Join(c.Services[primary].Command, " ")
		must(t, primary, want("command", text, "valkey-server /etc/redis.conf"))
		must(t, replica, want("command", strings.Join(c.Services[replica].Command, " "), text+" --replicaof "+primary+" 6379 --replica-announce-ip "+replica))
		for _, name := range []string{primary, replica} {
			service := c.Services[name]
			settings := strings.Join(service.redisSettings(t), " ")
			for _, part := range []string{"--maxmemory-policy noeviction", "--appendonly yes", "--requirepass " + c.password(t), "--masterauth " + c.password(t)} {
				must(t, name, want(part, strings.Contains(settings+" ", part+" "), true))
			}
			must(t, name, errors.Join(want("networks", fmt.Sprint(service.Networks), "[redis]"), want("ports", len(service.Ports), 0),
				want("variables", len(service.Environment), 0), want("secrets", fmt.Sprint(service.Secrets), "["+composeSecret+"]"),
				want("volumes", fmt.Sprint(service.Volumes), "[./redis.conf:/etc/redis.conf:ro "+name+":/data]")))
		}
	}

	prometheus := readYAML[struct {
		RuleFiles     []string `yaml:"rule_files"`
		ScrapeConfigs []struct {
			StaticConfigs []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}](t, composeDir+"/prometheus.yml")
	must(t, "Prometheus", errors.Join(want("targets", fmt.Sprint(prometheus.ScrapeConfigs[0].StaticConfigs[0].Targets), "[caddy:9180]"),
		want("published", fmt.Sprint(c.Services["prometheus"].Ports), "[127.0.0.1:9090:9090]"),
		want("reaching Caddy", slices.Contains(c.Services["caddy"].Networks, c.Services["prometheus"].Networks[0]), true)))

	grafana := c.Services["grafana"]
	sources := readYAML[struct {
		Datasources []struct {
			Type, URL string
			IsDefault bool `yaml:"isDefault"`
		}
	}](t, grafana.mounts()["/etc/grafana/provisioning/datasources/shardlimit.yml"]).Datasources
	providers := readYAML[struct {
		Providers []struct{ Options struct{ Path string } }
	}](t, grafana.mounts()["/etc/grafana/provisioning/dashboards/shardlimit.yml"]).Providers
	home := grafana.Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	must(t, "Grafana", errors.Join(want("type", sources[0].Type, "prometheus"), want("URL", sources[0].URL, "http://prometheus:9090"),
		want("being the default", sources[0].IsDefault, true), want("dashboards", path.Dir(home), providers[0].Options.Path),
		want("dashboard", grafana.mounts()[home], "contrib/grafana-dashboard.json"),
		want("networks", fmt.Sprint(grafana.Networks), fmt.Sprint(c.Services["prometheus"].Networks))))
}

func readYAML[T any](t *testing.T, file string) (v T) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read", err)
	must(t, "decode "+file, yaml.Unmarshal(text, &v))
	return v
}

// TestDockerfile checks what it shares with the README, go.mod, the Caddyfile and the manifest.
// `make contrib` runs its build command, which is the README's.
func TestDockerfile(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(dockerfile)
	must(t, "read", err)
	module, err := os.ReadFile("go.mod")
	must(t, "read", err)
	find := func(text []byte, pattern string) string {
		t.Helper()
		m := regexp.MustCompile(`(?m)^` + pattern + `$`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("no line is %s", pattern)
		}
		return string(m[1])
	}
	readme, err := os.ReadFile("README.md")
	must(t, "read", err)
	user := fmt.Sprint(readManifests(t)["Deployment"].Spec.Template.Spec.SecurityContext.RunAsUser)
	must(t, "the Dockerfile", errors.Join(
		want("Go", find(text, `ARG GO_VERSION=(\S+)`), find(module, `go (\d+\.\d+)(?:\.\d+)?`)),
		want("its build", find(text, `RUN (xcaddy build .*)`), find(readme, `(xcaddy build .*)`)),
		want("xcaddy", find(text, `RUN go install github\.com/caddyserver/xcaddy/cmd/xcaddy@(\S+)`), find(module, `\tgithub\.com/caddyserver/xcaddy (\S+)(?: // indirect)?`)),
		want("where its result is", find(text, `WORKDIR (\S+)`)+"/caddy", find(text, `COPY --from=build (\S+) /usr/bin/caddy`)),
		want("its ports", find(text, `EXPOSE (.*)`), strings.Join(readDeployed(t, deployedCaddyfiles(t)[composeCaddy]).ports(), " ")),
		want("its user", find(text, `USER (.*)`), user+":"+user), want("that user's ID", strings.Contains(string(text), " -u "+user+" "), true),
		want("health from the admin endpoint", strings.Contains(string(text), " http://"+strings.Replace(caddy.DefaultAdminListen, "localhost", "127.0.0.1", 1)+"/metrics "), true),
	))
	copied := regexp.MustCompile(`(?m)^COPY ([^-\n]\S*(?: \S+)*) \S+$`).FindAllStringSubmatch(string(text), -1)
	must(t, "the Dockerfile", want("copies", len(copied), 1))
	for _, m := range copied {
		for _, file := range strings.Fields(m[1]) {
			_, err := os.Stat(path.Join(composeDir, file))
			must(t, "copy", err)
		}
	}
}

// TestContribNamesTheNewestVersion checks the versions in contrib against the changelog.
func TestContribNamesTheNewestVersion(t *testing.T) {
	t.Parallel()
	changes, err := os.ReadFile("CHANGELOG.md")
	must(t, "read", err)
	newest := regexp.MustCompile(`(?m)^## (\d+\.\d+\.\d+)`).FindSubmatch(changes)
	must(t, "the changelog", want("having a version", newest != nil, true))
	for file, pattern := range map[string]string{
		kubernetesFile:                          `image: \S+/caddy-shardlimit:(\S+)`,
		chartFile:                               `\nversion: (\S+)`,
		"contrib/kubernetes/kustomization.yaml": `\?ref=v([0-9.]*[0-9])\]`,
		"contrib/README.md":                     `--with \S+/caddy-shardlimit@v([0-9.]*[0-9])`,
	} {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		named := regexp.MustCompile(pattern).FindSubmatch(text)
		must(t, file, want("having a version", named != nil, true))
		must(t, file, want("version", string(named[1]), string(newest[1])))
	}
}

// TestManifestsAgree checks names, ports and paths of the objects for Kubernetes.
func TestManifestsAgree(t *testing.T) {
	t.Parallel()
	objects := readManifests(t)
	text := objects["ConfigMap"].Data["Caddyfile"]
	config, template := readDeployed(t, text), objects["Deployment"].Spec.Template
	pod := template.Spec
	must(t, "the manifest", errors.Join(want("objects", len(objects), 4), want("containers", len(pod.Containers), 1)))
	container, names := pod.Containers[0], map[string]string{}
	var ports []string
	for _, port := range container.Ports {
		names[port.Name] = fmt.Sprint(port.ContainerPort)
		ports = append(ports, fmt.Sprint(port.ContainerPort))
	}
	must(t, "ports", errors.Join(want("container", fmt.Sprint(ports), fmt.Sprint(config.ports())), want("the admin endpoint being Caddy's default", len(config.Admin), 0),
		want("Service", names[objects["Service"].Spec.Ports[0].TargetPort], "8080"), want("ports of the Service", len(objects["Service"].Spec.Ports), 1),
		want("annotation", template.Metadata.Annotations["prometheus.io/port"], names["metrics"])))
	site := text[strings.Index(text, "\n:"+names["metrics"]+" {"):]
	must(t, "metrics", want("their path", strings.Contains(site, "metrics "+template.Metadata.Annotations["prometheus.io/path"]+"\n"), true))
	for _, p := range []probe{container.ReadinessProbe, container.LivenessProbe} {
		must(t, "probe", errors.Join(want("port", p.HTTPGet.Port, "metrics"), want("path", strings.Contains(site, "respond "+p.HTTPGet.Path+" 200"), true)))
	}
	labels := fmt.Sprint(template.Metadata.Labels)
	must(t, "selectors", errors.Join(want("Service", fmt.Sprint(objects["Service"].Spec.Selector), labels),
		want("Deployment", fmt.Sprint(objects["Deployment"].Spec.Selector["matchLabels"]), labels),
		want("PodDisruptionBudget", fmt.Sprint(objects["PodDisruptionBudget"].Spec.Selector["matchLabels"]), labels)))
	paths := map[string]string{}
	for _, mount := range container.VolumeMounts {
		paths[mount.Name] = mount.MountPath
	}
	must(t, "volumes", want("their number", len(pod.Volumes), len(paths)))
	for _, volume := range pod.Volumes {
		switch {
		case paths[volume.Name] == "":
			t.Errorf("the volume %s is not mounted", volume.Name)
		case volume.ConfigMap.Name != "":
			must(t, "ConfigMap", errors.Join(want("name", volume.ConfigMap.Name, objects["ConfigMap"].Metadata.Name), want("path", paths[volume.Name], "/etc/caddy")))
		case volume.Secret.SecretName != "":
			comment, err := os.ReadFile(kubernetesFile)
			must(t, "read", err)
			must(t, "the comment", want("creating "+volume.Secret.SecretName, strings.Contains(string(comment), "kubectl create secret generic "+volume.Secret.SecretName+" --from-literal=password="), true))
			must(t, "Secret", want("password in "+paths[volume.Name], strings.Contains(text, "password {file."+paths[volume.Name]+"/password}"), true))
		}
	}
}

// TestDeploymentsWaitForCharges checks that whatever kills Caddy first leaves time for its requests
// and for the delivery of charges.
func TestDeploymentsWaitForCharges(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("contrib/systemd/shardlimit.conf")
	must(t, "read", err)
	unit := regexp.MustCompile(`(?s)grace_period (\d+s).*\nTimeoutStopSec=(\d+s)\n`).FindSubmatch(text)
	must(t, "the drop-in", want("times", len(unit), 3))
	packaged, err := os.ReadFile("contrib/systemd/caddy.service")
	must(t, "read", err)
	must(t, "the unit of the packages", want("waiting as the drop-in", bytes.Contains(packaged, []byte("\nTimeoutStopSec="+string(unit[2])+"\n")), true))
	grace, err := time.ParseDuration(string(unit[1]))
	must(t, "parse", err)
	caddyfiles := deployedCaddyfiles(t)
	for what, times := range map[string]struct {
		ending time.Duration
		killed string
	}{
		"systemd":    {ending: grace, killed: string(unit[2])},
		"Compose":    {ending: readDeployed(t, caddyfiles[composeCaddy]).ending(), killed: readCompose(t).Services["caddy"].StopGrace},
		"Kubernetes": {ending: readDeployed(t, caddyfiles[kubernetesFile]).ending(), killed: fmt.Sprint(readManifests(t)["Deployment"].Spec.Template.Spec.TerminationGracePeriodSeconds, "s")},
	} {
		killed, err := time.ParseDuration(times.killed)
		must(t, what, err)
		if longest := times.ending + deliveryAtExit(t); times.ending <= 0 || killed < longest+2*time.Second {
			t.Errorf("%s kills Caddy after %v; it may take %v", what, killed, longest)
		}
	}
}
