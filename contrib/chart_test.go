package contrib

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

var update = flag.Bool("update", false, "write kubernetes/caddy.yaml")

// render renders the chart as `helm template` does for a release, with its schema.
func render(release string, values map[string]any) (string, error) {
	chart, err := loader.Load(filepath.Join("kubernetes", "chart"))
	if err != nil {
		return "", err
	}
	checked, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: release, Namespace: "default"}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(chart, checked)
	return files[chart.Name()+"/templates/caddy.yaml"], err
}

// TestChart checks that the manifest is the chart with its default values, and that other values are
// in objects of Kubernetes's API where they belong.
func TestChart(t *testing.T) {
	file := filepath.Join("kubernetes", "caddy.yaml")
	rendered, err := render("caddy", nil)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, []byte(rendered), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	manifest, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if rendered != string(manifest) {
		t.Errorf("%s is not what the chart renders; run the test with -update", file)
	}
	changed, err := render("true", map[string]any{
		"image":    map[string]any{"repository": "registry.example/caddy", "tag": "mine"},
		"replicas": 5, "passwordSecret": "123", "terminationGracePeriodSeconds": 60,
		"resources": map[string]any{"limits": map[string]any{"memory": "2Gi"}},
		"caddyfile": ":8080 {\n\trespond \"{{ mine }}\"\n}\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"image: registry.example/caddy:mine\n", "replicas: 5\n", `secretName: "123",`, "terminationGracePeriodSeconds: 60\n",
		"memory: 2Gi\n", "name: \"true\"\n", "\n    \trespond \"{{ mine }}\"\n",
	} {
		if !strings.Contains(changed, text) {
			t.Errorf("the chart with other values has no %q", text)
		}
	}
	decodeObjects(t, []byte(changed))
}

// TestChartRefusesValues checks that misspelt and impossible values are errors.
func TestChartRefusesValues(t *testing.T) {
	for name, values := range map[string]map[string]any{
		"misspelt":    {"replica": 3},
		"no replicas": {"replicas": 0},
		"no time":     {"terminationGracePeriodSeconds": 5},
		"no config":   {"caddyfile": ""},
		"indented":    {"caddyfile": "\t:8080 {\n}\n"},
		"no secret":   {"passwordSecret": "My Secret"},
	} {
		if _, err := render("caddy", values); err == nil {
			t.Errorf("%s: the chart accepts %v", name, values)
		}
	}
	// Helm allows names that a Service cannot have.
	for _, release := range []string{"123", "1e3", "my.caddy", "2024-web"} {
		if _, err := render(release, nil); err == nil {
			t.Errorf("the chart accepts a release called %s", release)
		}
	}
}

// TestKustomization builds the kustomization, which has the objects of the manifest.
func TestKustomization(t *testing.T) {
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	text, err := resources.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	decodeObjects(t, text)
}
