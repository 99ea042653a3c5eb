#include "tests/service/access/certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <filesystem>

namespace tributary::test {
namespace {

template <typename T, void (*free)(T*)>
struct Free {
  void operator()(T* value) const { free(value); }
};
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;

void Require(bool done, const char* what) {
  if (!done) throw std::runtime_error(std::string("OpenSSL: ") + what);
}

void AddExtension(X509* certificate, X509* issuer, int id, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, id, value.c_str());
  Require(extension != nullptr, value.c_str());
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// Unsigned, with a random serial number.
Certificate Blank(const std::string& name, EVP_PKEY* key, const LeafOptions& options) {
  Certificate certificate(X509_new());
  X509_set_version(certificate.get(), X509_VERSION_3);
  uint32_t serial = 0;
  RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial));
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), static_cast<int32_t>(serial >> 1));
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), options.begins);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), options.ends);
  X509_set_pubkey(certificate.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return certificate;
}

// Through a rename, so that nobody reads half of it.
template <typename Write>
void Replace(const std::string& path, Write write) {
  const std::string next = path + ".next";
  FILE* const file = std::fopen(next.c_str(), "w");
  Require(file != nullptr, path.c_str());
  const bool written = write(file) == 1;
  Require(std::fclose(file) == 0 && written, path.c_str());
  std::filesystem::rename(next, path);
}

}  // namespace

struct Authority::Keys {
  Key key{EVP_EC_gen("P-256")};
  Certificate certificate;
};

Authority::Authority() : keys_(std::make_unique<Keys>()) {
  keys_->certificate = Blank("test authority", keys_->key.get(), {});
  X509* const own = keys_->certificate.get();
  X509_set_issuer_name(own, X509_get_subject_name(own));
  AddExtension(own, own, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(own, own, NID_subject_key_identifier, "hash");
  Require(X509_sign(own, keys_->key.get(), EVP_sha256()) > 0, "sign");
  Replace(file(), [&](FILE* f) { return PEM_write_X509(f, own); });
}

Authority::~Authority() = default;

TlsFiles Authority::Issue(const std::string& name, const LeafOptions& options) {
  const Key key(EVP_EC_gen("P-256"));
  const Certificate leaf = Blank(name, key.get(), options);
  X509* const issuer = keys_->certificate.get();
  X509_set_issuer_name(leaf.get(), X509_get_subject_name(issuer));
  std::string names;
  for (const std::string& n : options.names) names += (names.empty() ? "DNS:" : ",DNS:") + n;
  AddExtension(leaf.get(), issuer, NID_subject_alt_name, names);
  Require(X509_sign(leaf.get(), keys_->key.get(), EVP_sha256()) > 0, "sign");
  const TlsFiles files = {.certificate = directory_.File(name + ".pem"),
                          .key = directory_.File(name + ".key"),
                          .authorities = ""};
  Replace(files.key, [&](FILE* f) {
    return PEM_write_PrivateKey(f, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  Replace(files.certificate, [&](FILE* f) { return PEM_write_X509(f, leaf.get()); });
  return files;
}

}  // namespace tributary::test
