#include <cxxabi.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "common/random_operands.hpp"
#include "stepgraph/kernels/launch_shape.hpp"
#include "stepgraph/kernels/signature.hpp"
#include "stepgraph/math/adam.hpp"

// Reads the instructions of the compiled kernels. Needs cuobjdump, but no GPU.
namespace stepgraph {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct instruction {
  std::uint64_t address = 0;
  bool conditional = false;
  std::string opcode;  ///< with its modifiers
  std::string operands;
};

struct kernel_code {
  std::vector<instruction> instructions;
  int registers = 0;
};

/// The disassembler: from the environment, else what was found when the build was configured.
std::string disassembler() {
  const char* const from_environment = std::getenv("STEPGRAPH_CUOBJDUMP");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return STEPGRAPH_CUOBJDUMP;
}

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : symbol;
}

/// Calls `body` with each line that the disassembler prints.
template <class Body>
void for_output_of(const std::string& options, const std::string& file, Body&& body) {
  const std::string command =
      "'" + disassembler() + "' " + options + " -arch sm_90 '" + file + "' 2>/dev/null";
  const std::unique_ptr<FILE, decltype(&pclose)> output(popen(command.c_str(), "r"), &pclose);
  char line[4096];
  while (output != nullptr && std::fgets(line, sizeof(line), output.get()) != nullptr) {
    body(std::string(line));
  }
}

/// The kernels of an object file or archive by demangled name.
std::map<std::string, kernel_code> disassemble(const std::string& file) {
  std::map<std::string, kernel_code> kernels;
  kernel_code* kernel = nullptr;
  for_output_of("-sass", file, [&](const std::string& text) {
    if (const auto start = text.find("Function : "); start != std::string::npos) {
      const auto end = text.find_last_not_of(" \n");
      kernel = &kernels[demangled(text.substr(start + 11, end - start - 10))];
      return;
    }
    // "        /*0a10*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
    static const std::regex expression(
        R"(^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);)");
    std::smatch match;
    if (kernel != nullptr && std::regex_search(text, match, expression)) {
      kernel->instructions.push_back(
          {std::stoull(match[1].str(), nullptr, 16), match[2].matched, match[3], match[4]});
    }
  });
  // " Function <symbol>:" and on the next line "  REG:53 STACK:0 ..."
  for_output_of("-res-usage", file, [&](const std::string& text) {
    static const std::regex function(R"(Function (\S+):)");
    static const std::regex registers(R"(REG:(\d+))");
    std::smatch match;
    if (std::regex_search(text, match, function)) kernel = &kernels[demangled(match[1])];
    if (kernel != nullptr && std::regex_search(text, match, registers)) {
      kernel->registers = std::stoi(match[1]);
    }
  });
  return kernels;
}

/// Instructions whose opcode matches.
int count(const kernel_code& kernel, const std::string& pattern) {
  const std::regex expression(pattern);
  int total = 0;
  for (const instruction& each : kernel.instructions) {
    total += std::regex_match(each.opcode, expression) ? 1 : 0;
  }
  return total;
}

bool is_load(const instruction& each) { return each.opcode.starts_with("LDG"); }

/// A store of more than one element: of the path of whole accesses, not of the record, whose words
/// are for the host.
bool is_wide_store(const instruction& each) {
  static const std::regex expression(R"(STG\.E(\.\w+)*\.(64|128)(\.\w+)*)");
  return std::regex_match(each.opcode, expression) &&
         each.opcode.find(".STRONG.SYS") == std::string::npos;
}

/// Where a backward branch goes; the branch's own address for all other instructions.
std::uint64_t loop_start(const instruction& each) {
  static const std::regex target(R"(0x([0-9a-f]+))");
  std::smatch match;
  if (each.opcode != "BRA" || !std::regex_search(each.operands, match, target)) return each.address;
  return std::min<std::uint64_t>(each.address, std::stoull(match[1].str(), nullptr, 16));
}

/// Loads that run after a whole access was stored and before another is: each is a scalar, a term
/// or a pointer that is read again for some elements, since all operands are in flight before the
/// first store. Whole accesses are unrolled, so every load of a loop over them counts.
int loads_among_stores(const kernel_code& kernel) {
  int found = 0;
  int pending = 0;  // since the last wide store of this stretch of code
  bool storing = false;
  for (const instruction& each : kernel.instructions) {
    if (is_wide_store(each)) {
      found += pending;
      pending = 0;
      storing = true;
    } else if (is_load(each) && storing) {
      ++pending;
    } else if ((each.opcode == "BRA" || each.opcode == "EXIT") && !each.conditional) {
      storing = false;
      pending = 0;
    }
    int loads = 0;
    int wide_stores = 0;
    for (const instruction& looped : kernel.instructions) {
      if (looped.address < loop_start(each) || looped.address >= each.address) continue;
      loads += is_load(looped) ? 1 : 0;
      wide_stores += is_wide_store(looped) ? 1 : 0;
    }
    if (wide_stores != 0) found += loads;
  }
  return found;
}

/// Reads of 16 bytes after a wait for the predecessors: the terms of a group, and in some kernels
/// the scalars.
struct reads_of_terms {
  int together = 0;  ///< waits that are followed by two and more of them before any branch
  int later = 0;     ///< of them, those that a branch or a predicate puts behind another round trip
};

reads_of_terms reads_after_waits(const kernel_code& kernel) {
  reads_of_terms found;
  bool waited = false;
  bool branched = false;
  int reads = 0;
  for (const instruction& each : kernel.instructions) {
    if (each.opcode == "ACQBULK") {
      waited = true;
      branched = false;
      reads = 0;
    } else if (each.opcode == "BRA" || each.opcode == "EXIT") {
      branched = true;
      if (!each.conditional) waited = false;
    } else if (waited && is_load(each) && each.opcode.find(".128") != std::string::npos) {
      if (branched || each.conditional) {
        ++found.later;
      } else if (++reads == 2) {
        ++found.together;
      }
    }
  }
  return found;
}

/// Elements of an access in the kernel that is tuned for a signature: 8 where every operand has 2
/// bytes an element, so that all accesses have 16 bytes; else 4.
int elements_of_an_access(const update_signature& signature) {
  for (const storage_format format : test::formats_of(signature)) {
    if (format != storage_format::none && element_size(format) != 2) return 4;
  }
  return 8;
}

/// What an update kernel of this signature does wrong, in words; empty if nothing.
std::vector<std::string> complaints(const kernel_code& kernel, const update_signature& signature) {
  std::vector<std::string> found;
  const auto forbid = [&](const std::string& pattern, const std::string& why) {
    if (const int times = count(kernel, pattern)) {
      found.push_back(why + ": " + std::to_string(times) + " instructions " + pattern);
    }
  };
  const auto require = [&](const std::string& pattern, int least, const std::string& why) {
    if (const int times = count(kernel, pattern); times < least) {
      found.push_back(why + ": " + std::to_string(times) + " instructions " + pattern +
                      ", expected " + std::to_string(least));
    }
  };

  forbid(R"(D(ADD|MUL|FMA|SETP|MNMX)\b.*|.*\bF64\b.*|MUFU\..*64H.*)", "double arithmetic");
  forbid(R"((LDL|STL)\b.*)", "local memory");
  if (const int times = loads_among_stores(kernel)) {
    found.push_back("loads among the stores: " + std::to_string(times));
  }
  // For whole accesses and for single elements.
  const reads_of_terms reads = reads_after_waits(kernel);
  if (reads.together < 2 || reads.later != 0) {
    found.push_back("terms are read one after the other: " + std::to_string(reads.together) +
                    " times together, " + std::to_string(reads.later) + " times later");
  }
  if (kernel.registers > 80) {
    found.push_back("registers: " + std::to_string(kernel.registers) + ", at most 80");
  }

  // Accesses of one operand, by its bytes in one access.
  const int width = elements_of_an_access(signature);
  const int accesses =
      static_cast<int>(chunk_elements / update_blocks_per_chunk / update_threads) / width;
  std::map<int, int> loads;
  std::map<int, int> stores;
  const auto add = [&](std::map<int, int>& counts, storage_format format) {
    counts[static_cast<int>(element_size(format)) * width] += accesses;
  };
  add(loads, signature.gradient);
  add(stores, signature.gradient);  // zeroes
  add(stores, signature.parameter);
  // With a master, the parameter is read only where it is half of it.
  if (signature.master == storage_format::none || signature.master == storage_format::remainder) {
    add(loads, signature.parameter);
  }
  for (const storage_format state : {signature.master, signature.exp_avg, signature.exp_avg_sq}) {
    add(loads, state);
    add(stores, state);
  }
  // The terms of the group, for whole accesses and for single elements.
  loads[16] += 2 * static_cast<int>(sizeof(math::adam_terms) / 16);
  for (const auto& [bytes, modifier] : {std::pair{16, "128"}, std::pair{8, "64"}}) {
    const std::string width_in_bits = std::string(R"((\.\w+)*\.)") + modifier + R"((\.\w+)*)";
    const std::string by = " by " + std::to_string(bytes) + " bytes";
    require(R"(LDG\.E)" + width_in_bits, loads[bytes], "operands are not loaded" + by);
    require(R"(STG\.E)" + width_in_bits, stores[bytes], "operands are not stored" + by);
  }
  // Four e4m3 elements fill a plain 4-byte access.
  require(R"(LDG\.E)", loads[4], "operands are not loaded by 4 bytes");
  require(R"(STG\.E)", stores[4], "operands are not stored by 4 bytes");
  return found;
}

/// The kernel that is instantiated for exactly this signature; null if there is none.
const kernel_code* update_kernel_of(const std::map<std::string, kernel_code>& kernels,
                                    const update_signature& signature) {
  std::string formats = "tuned_formats<";
  for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                      signature.exp_avg, signature.exp_avg_sq}) {
    if (formats.back() != '<') formats += ", ";
    formats += "(stepgraph::storage_format)" + std::to_string(static_cast<int>(format));
  }
  for (const auto& [name, code] : kernels) {
    if (name.find(formats + ">") != std::string::npos) return &code;
  }
  return nullptr;
}

class Disassembly : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(disassembler())) {
      GTEST_SKIP() << "no cuobjdump; set STEPGRAPH_CUOBJDUMP";
    }
    if (std::string(STEPGRAPH_CUDA_ARCHITECTURES).find("90") == std::string::npos) {
      GTEST_SKIP() << "kernels are not compiled for sm_90";
    }
  }
};

TEST_F(Disassembly, TunedUpdateKernelsStreamInSinglePrecisionByWideAccesses) {
  const auto kernels = disassemble(STEPGRAPH_KERNELS_FILE);
  for (const update_signature& signature : test::tuned_signatures()) {
    const kernel_code* const kernel = update_kernel_of(kernels, signature);
    ASSERT_NE(kernel, nullptr) << "no kernel of its own for " << name_of(signature);
    EXPECT_GT(kernel->registers, 0);
    EXPECT_THAT(complaints(*kernel, signature), IsEmpty()) << name_of(signature);
  }
}

TEST_F(Disassembly, GenericKernelUsesNoDoublesNoLocalMemoryAndFewRegisters) {
  const auto kernels = disassemble(STEPGRAPH_KERNELS_FILE);
  int generic = 0;
  for (const auto& [name, code] : kernels) {
    if (name.find("generic_formats") == std::string::npos) continue;
    ++generic;
    EXPECT_EQ(count(code, R"(D(ADD|MUL|FMA|SETP|MNMX)\b.*|.*\bF64\b.*)"), 0);
    EXPECT_EQ(count(code, R"((LDL|STL)\b.*)"), 0);
    EXPECT_GT(code.registers, 0);
    EXPECT_LE(code.registers, 128);
  }
  EXPECT_EQ(generic, 1);
}

/// What is missing for programmatic dependent launch: PREEXIT lets the successor start, ACQBULK
/// waits for the predecessors, and nothing is written before it.
std::vector<std::string> dependent_launch_complaints(const kernel_code& kernel) {
  std::vector<std::string> found;
  if (count(kernel, "PREEXIT") == 0) found.push_back("does not let its successors start");
  if (count(kernel, "ACQBULK") == 0) found.push_back("does not wait for its predecessors");
  for (const instruction& each : kernel.instructions) {
    if (each.opcode == "ACQBULK") break;
    static const std::regex writes(R"((ST|STG|RED|ATOM|ATOMG)(\..*)?)");
    if (std::regex_match(each.opcode, writes)) found.push_back("writes before it waits");
  }
  return found;
}

TEST_F(Disassembly, EveryKernelOfTheStepStartsItsSuccessorsAndWaitsForItsPredecessors) {
  const auto kernels = disassemble(STEPGRAPH_KERNELS_FILE);
  for (const char* const operation :
       {"grad_stats_kernel", "grad_totals_kernel", "advance_step_kernel", "apply_settings_kernel",
        "scale_gradients_kernel", "update_kernel", "set_condition_kernel", "begin_loop_kernel",
        "end_of_step_kernel"}) {
    const bool known = std::any_of(kernels.begin(), kernels.end(), [&](const auto& each) {
      return each.first.find(operation) != std::string::npos;
    });
    EXPECT_TRUE(known) << operation;
  }
  for (const auto& [name, code] : kernels) {
    EXPECT_THAT(dependent_launch_complaints(code), IsEmpty()) << name;
  }
}

TEST_F(Disassembly, NoKernelOfTheStepUsesLocalMemory) {
  for (const auto& [name, code] : disassemble(STEPGRAPH_KERNELS_FILE)) {
    EXPECT_EQ(count(code, R"((LDL|STL)\b.*)"), 0) << name;
  }
}

/// Whether one way through the kernel loads by 16 bytes, lets the successors start and loads
/// nothing after that.
bool starts_successors_after_loads(const kernel_code& kernel) {
  bool loaded = false;
  bool started = false;
  for (const instruction& each : kernel.instructions) {
    if (is_load(each)) {
      loaded = loaded || each.opcode.find(".128") != std::string::npos;
      started = false;
    } else if (each.opcode == "PREEXIT") {
      started = loaded;
    } else if (each.opcode == "EXIT" && !each.conditional && started) {
      return true;
    }
  }
  return false;
}

// An update that starts earlier fetches its operands while the gradients are still on their way,
// and all of the step waits for these.
TEST_F(Disassembly, UpdateStartsWhenTheGradientsAreThere) {
  int measuring = 0;
  for (const auto& [name, code] : disassemble(STEPGRAPH_KERNELS_FILE)) {
    const bool measures = name.find("grad_stats_kernel") != std::string::npos ||
                          name.find("grad_totals_kernel") != std::string::npos;
    measuring += measures ? 1 : 0;
    EXPECT_EQ(starts_successors_after_loads(code), measures) << name;
  }
  EXPECT_EQ(measuring, 8);
}

TEST_F(Disassembly, KernelsWithoutDependentLaunchAreFound) {
  const auto kernels = disassemble(STEPGRAPH_BAD_KERNELS_FILE);
  ASSERT_THAT(kernels, Not(IsEmpty()));
  for (const auto& [name, code] : kernels) {
    if (name.find("_terms(") != std::string::npos) continue;
    EXPECT_THAT(dependent_launch_complaints(code),
                AllOf(Contains(HasSubstr("successors")), Contains(HasSubstr("predecessors"))))
        << name;
  }
}

TEST_F(Disassembly, ChecksRejectKernelsThatDoOneThingWrong) {
  const auto kernels = disassemble(STEPGRAPH_BAD_KERNELS_FILE);
  const std::pair<const char*, const char*> wrong[] = {
      {"update_with_double_power", "double arithmetic"},
      {"update_with_double_power", "not loaded by 16 bytes"},
      {"update_with_double_power", "not stored by 16 bytes"},
      {"update_with_local_array", "local memory"},
      {"update_with_late_terms", "terms are read one after the other: 1 times together, 1 times"},
      {"update_with_predicated_terms", "terms are read one after the other: 0 times together, 1"},
      {"update_with_terms_read_again", "loads among the stores"},
      {"update_in_a_loop", "loads among the stores"},
  };
  for (const auto& [function, complaint] : wrong) {
    const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const auto& each) {
      return each.first.find(function) != std::string::npos;
    });
    ASSERT_NE(kernel, kernels.end()) << function;
    EXPECT_THAT(complaints(kernel->second, {}), Contains(HasSubstr(complaint))) << function;
  }
}

// A kernel whose only fault is the scalar in its loop: no other check would find it.
TEST_F(Disassembly, KernelThatReadsItsTermsAgainIsWrongInNothingElse) {
  const auto kernels = disassemble(STEPGRAPH_BAD_KERNELS_FILE);
  for (const auto& [name, code] : kernels) {
    if (name.find("update_with_terms_read_again") == std::string::npos) continue;
    const std::vector<std::string> found = complaints(code, {});
    EXPECT_THAT(found, Not(Contains(HasSubstr("double"))));
    EXPECT_THAT(found, Not(Contains(HasSubstr("local"))));
    EXPECT_THAT(found, Not(Contains(HasSubstr("stored by"))));
  }
}

}  // namespace
}  // namespace stepgraph
