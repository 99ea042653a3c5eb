// Renders a Helm chart the way `helm template` does, for tests on machines where Helm is not to be had. It is built
// from Debian's packages of the libraries Helm itself uses: sprig for template functions, sigs.k8s.io/yaml for YAML
// (numbers are float64, as in Helm), gojsonschema for values.schema.json and semver for kubeVersion.
//
//	render [flags] CHART > manifests.yaml
//
// It is stricter than Helm in one point: a value that neither values.yaml nor the user gives is an error, not "".
// Left out, because this project's chart has no use for them: dependencies, .helmignore, hooks' order, lookup.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/semver"
	"github.com/Masterminds/sprig"
	"github.com/xeipuuv/gojsonschema"
	"sigs.k8s.io/yaml"
)

type values = map[string]interface{}

type options struct {
	release, namespace, kubeVersion string
	apiVersions, valueFiles, sets   list
	notes                           bool
}

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// Has makes a list serve as .Capabilities.APIVersions.
func (l list) Has(version string) bool {
	for _, one := range l {
		if one == version {
			return true
		}
	}
	return false
}

// files is .Files: what the chart holds beside its templates.
type files map[string][]byte

func (f files) Get(name string) string { return string(f[name]) }

func (f files) Glob(pattern string) files {
	found := files{}
	for name, content := range f {
		if ok, _ := path.Match(pattern, name); ok {
			found[name] = content
		}
	}
	return found
}

// AsConfig is the files as data of a ConfigMap, by base name.
func (f files) AsConfig() string {
	data := map[string]string{}
	for name, content := range f {
		data[path.Base(name)] = string(content)
	}
	return toYAML(data)
}

func toYAML(v interface{}) string {
	out, err := yaml.Marshal(v)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(out), "\n")
}

func readYAML(name string) (values, error) {
	content, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	parsed := values{}
	if err := yaml.Unmarshal(content, &parsed); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return parsed, nil
}

// merge lays `over` on `base`: maps are merged, null removes, all else replaces.
func merge(base, over values) {
	for key, value := range over {
		if value == nil {
			delete(base, key)
			continue
		}
		below, isMap := base[key].(values)
		above, bothMaps := value.(values)
		if isMap && bothMaps {
			merge(below, above)
		} else {
			base[key] = value
		}
	}
}

// setOne applies "a.b=value"; the value is read as YAML, so that 3 is a number and true a truth.
func setOne(base values, assignment string) error {
	name, text, found := strings.Cut(assignment, "=")
	if !found {
		return fmt.Errorf("--set %s: want name=value", assignment)
	}
	var value interface{}
	if err := yaml.Unmarshal([]byte(text), &value); err != nil {
		return fmt.Errorf("--set %s: %w", assignment, err)
	}
	keys := strings.Split(name, ".")
	nested := values{keys[len(keys)-1]: value}
	for i := len(keys) - 2; i >= 0; i-- {
		nested = values{keys[i]: nested}
	}
	merge(base, nested)
	return nil
}

func mergedValues(chart string, o *options) (values, error) {
	merged, err := readYAML(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return nil, err
	}
	for _, name := range o.valueFiles {
		over, err := readYAML(name)
		if err != nil {
			return nil, err
		}
		merge(merged, over)
	}
	for _, assignment := range o.sets {
		if err := setOne(merged, assignment); err != nil {
			return nil, err
		}
	}
	return merged, nil
}

func checkSchema(chart string, v values) error {
	schema, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	result, err := gojsonschema.Validate(gojsonschema.NewBytesLoader(schema), gojsonschema.NewGoLoader(v))
	if err != nil {
		return fmt.Errorf("values.schema.json: %w", err)
	}
	if result.Valid() {
		return nil
	}
	message := "values don't meet the specifications of the schema:"
	for _, problem := range result.Errors() {
		message += "\n- " + problem.String()
	}
	return errors.New(message)
}

func checkKubeVersion(chart values, have string) error {
	want, _ := chart["kubeVersion"].(string)
	if want == "" {
		return nil
	}
	constraint, err := semver.NewConstraint(want)
	if err != nil {
		return fmt.Errorf("Chart.yaml: kubeVersion: %w", err)
	}
	version, err := semver.NewVersion(have)
	if err != nil {
		return fmt.Errorf("--kube-version: %w", err)
	}
	if !constraint.Check(version) {
		return fmt.Errorf("chart requires kubeVersion: %s which is incompatible with Kubernetes %s", want, have)
	}
	return nil
}

// load reads a chart's templates (by name) and its other files.
func load(chart string) (templates map[string]string, rest files, err error) {
	templates, rest = map[string]string{}, files{}
	err = filepath.WalkDir(chart, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(chart, name)
		if err != nil {
			return err
		}
		if strings.HasPrefix(relative, "templates/") {
			templates[relative] = string(content)
		} else {
			rest[relative] = content
		}
		return nil
	})
	return templates, rest, err
}

func functions(t *template.Template) template.FuncMap {
	f := sprig.TxtFuncMap()
	// As in Helm: a chart must not see the machine it is rendered on.
	delete(f, "env")
	delete(f, "expandenv")
	f["toYaml"] = toYAML
	f["fromYaml"] = func(text string) (values, error) {
		parsed := values{}
		err := yaml.Unmarshal([]byte(text), &parsed)
		return parsed, err
	}
	f["fromYamlArray"] = func(text string) ([]interface{}, error) {
		parsed := []interface{}{}
		err := yaml.Unmarshal([]byte(text), &parsed)
		return parsed, err
	}
	f["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := t.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	f["tpl"] = func(text string, data interface{}) (string, error) {
		clone, err := t.Clone()
		if err != nil {
			return "", err
		}
		parsed, err := clone.New("tpl").Parse(text)
		if err != nil {
			return "", err
		}
		var out bytes.Buffer
		err = parsed.Execute(&out, data)
		return out.String(), err
	}
	f["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, errors.New(message)
		}
		return value, nil
	}
	return f
}

func chartObject(chart values) values {
	object := values{}
	for key, value := range chart {
		object[strings.ToUpper(key[:1])+key[1:]] = value
	}
	return object
}

func render(chartPath string, o *options) (string, error) {
	chart, err := readYAML(filepath.Join(chartPath, "Chart.yaml"))
	if err != nil {
		return "", err
	}
	if err := checkKubeVersion(chart, o.kubeVersion); err != nil {
		return "", err
	}
	merged, err := mergedValues(chartPath, o)
	if err != nil {
		return "", err
	}
	if err := checkSchema(chartPath, merged); err != nil {
		return "", err
	}
	templates, rest, err := load(chartPath)
	if err != nil {
		return "", err
	}

	root := template.New("chart").Option("missingkey=error")
	root.Funcs(functions(root))
	var names []string
	for name, text := range templates {
		if _, err := root.New(name).Parse(text); err != nil {
			return "", err
		}
		if !strings.HasPrefix(path.Base(name), "_") {
			names = append(names, name)
		}
	}
	sort.Strings(names)

	version, err := semver.NewVersion(o.kubeVersion)
	if err != nil {
		return "", err
	}
	data := values{
		"Values": merged, "Chart": chartObject(chart), "Files": rest,
		"Release": values{"Name": o.release, "Namespace": o.namespace, "Service": "Helm", "IsInstall": true,
			"IsUpgrade": false, "Revision": 1},
		"Capabilities": values{
			"KubeVersion": values{"Version": o.kubeVersion, "GitVersion": o.kubeVersion,
				"Major": fmt.Sprint(version.Major()), "Minor": fmt.Sprint(version.Minor())},
			"APIVersions": append(list{"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}, o.apiVersions...)},
	}
	var out strings.Builder
	for _, name := range names {
		if strings.HasSuffix(name, ".txt") != o.notes {
			continue
		}
		data["Template"] = values{"Name": name, "BasePath": "templates"}
		var text bytes.Buffer
		if err := root.ExecuteTemplate(&text, name, data); err != nil {
			return "", err
		}
		switch {
		case o.notes:
			out.Write(text.Bytes())
		case strings.TrimSpace(text.String()) != "":
			fmt.Fprintf(&out, "---\n# Source: %s\n%s\n", name, strings.TrimSpace(text.String()))
		}
	}
	return out.String(), nil
}

func main() {
	var o options
	flag.StringVar(&o.release, "release", "tributary", "name of the release")
	flag.StringVar(&o.namespace, "namespace", "default", "namespace of the release")
	flag.StringVar(&o.kubeVersion, "kube-version", "v1.34.0", "version of Kubernetes to render for")
	flag.Var(&o.apiVersions, "api-versions", "group/version/Kind the cluster knows besides the usual ones; repeatable")
	flag.Var(&o.valueFiles, "f", "file of values; repeatable, later ones win")
	flag.Var(&o.sets, "set", "name.of.value=value; repeatable, wins over files")
	flag.BoolVar(&o.notes, "notes", false, "render the notes instead of the manifests")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: render [flags] CHART")
		os.Exit(2)
	}
	out, err := render(flag.Arg(0), &o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
	fmt.Print(out)
}
